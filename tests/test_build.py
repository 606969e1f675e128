# SPDX-License-Identifier: Apache-2.0
"""What is compiled where, and what the compiled libraries depend on."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import setuptools
import torch
from setuptools.errors import CompileError

from vllm import _extension

ROOT = Path(__file__).parents[1]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, on a machine without nvcc."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("vllm_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PATH", str(ROOT))
    monkeypatch.setenv("CUDA_HOME", str(ROOT / "nowhere"))
    monkeypatch.delenv("CUDACXX", raising=False)
    return module


def make_nvcc(directory: Path) -> Path:
    nvcc = directory / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return nvcc


def names(build: ModuleType, target: str) -> list[str]:
    return [extension.name for extension in build.extensions(target)]


def test_the_cuda_ops_need_nvcc_or_to_be_asked_for(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names(build, "empty") == []
    assert names(build, "cpu") == ["vllm._C_cpu"]
    assert names(build, "cuda") == ["vllm._C_cpu", "vllm._C_cuda"]
    make_nvcc(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert names(build, "cpu") == ["vllm._C_cpu", "vllm._C_cuda"]
    assert names(build, "empty") == []


def test_nvcc_is_searched_in_order(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.find_nvcc() is None
    home = make_nvcc(tmp_path / "home" / "bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert build.find_nvcc() == str(home)
    on_path = make_nvcc(tmp_path / "path")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert build.find_nvcc() == str(on_path)
    named = make_nvcc(tmp_path / "named")
    monkeypatch.setenv("CUDACXX", str(named))
    assert build.find_nvcc() == str(named)
    monkeypatch.setenv("CUDACXX", str(tmp_path / "missing"))
    with pytest.raises(CompileError, match="missing is not an executable"):
        build.find_nvcc()


def test_an_nvcc_that_is_not_there_ends_without_a_trace(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    with pytest.raises(SystemExit, match="error: CUDACXX=/nowhere/nvcc is not an executable"):
        build.extensions("cpu")


def test_the_number_of_compilers(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    assert build.num_jobs() == 3
    monkeypatch.setenv("MAX_JOBS", "")
    assert build.num_jobs() >= 1
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("MAX_JOBS", wrong)
        with pytest.raises(CompileError, match=f"MAX_JOBS={wrong} is no number"):
            build.num_jobs()


def test_a_build_of_another_compiler_is_forgotten(build: ModuleType, tmp_path: Path) -> None:
    """CMake forgets where torch is when it finds that the compiler has changed."""
    folder = tmp_path / "cmake"

    def stays(cxx: str, nvcc: str) -> bool:
        folder.mkdir(exist_ok=True)
        (folder / "CMakeCache.txt").write_text(
            "CMAKE_CXX_COMPILER:STRING=/usr/bin/c++\nVLLM_CUDA:FILEPATH=/cuda/nvcc\n"
        )
        build.forget_other_compilers(folder, {"CMAKE_CXX_COMPILER": cxx, "VLLM_CUDA": nvcc})
        return folder.exists()

    assert stays("/usr/bin/c++", "/cuda/nvcc") and stays("/usr/bin/c++", "")
    assert not stays("/usr/bin/clang++", "/cuda/nvcc")
    assert not stays("/usr/bin/c++", "/other/nvcc")
    build.forget_other_compilers(folder, {"CMAKE_CXX_COMPILER": "/usr/bin/c++"})


def test_a_build_without_nvcc(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = build.CMakeBuild(setuptools.Distribution())
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    with pytest.raises(CompileError, match="VLLM_TARGET_DEVICE=cuda needs nvcc"):
        command.run()
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    command.extensions = []
    command.run()
    assert capsys.readouterr().out.count("are left out: nvcc is not installed") == 1


def test_each_extension_builds_its_own_target(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDACXX", str(make_nvcc(tmp_path)))
    for finder in ("find_torch", "find_cmake", "find_compiler"):
        monkeypatch.setattr(build, finder, lambda finder=finder: finder)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    commands: list[list[str]] = []

    class Recorded(build.CMakeBuild):  # type: ignore[name-defined,misc]
        def run_cmake(self, command: list[str]) -> None:
            commands.append(command)
            if "--target" in command:
                target = command[command.index("--target") + 1]
                (Path(command[2]) / f"{target}.so").write_text(target)

    command = Recorded(setuptools.Distribution())
    command.build_lib = str(tmp_path / "lib")
    for extension in build.extensions("cuda"):
        command.build_extension(extension)
    assert f"-DVLLM_CUDA={tmp_path / 'nvcc'}" in commands[0]
    for name in ("_C_cpu", "_C_cuda"):
        assert (tmp_path / "lib" / "vllm" / f"{name}.so").read_text() == name


def test_sources_of_every_target_are_in_the_source_distribution() -> None:
    patterns = (ROOT / "MANIFEST.in").read_text()
    suffixes = {path.suffix for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert {f"*{suffix}" for suffix in suffixes} <= set(patterns.split())


def test_a_library_that_is_not_built_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_extension, "CUDA_LIBRARY", tmp_path / "_C_cuda.so")
    with pytest.raises(RuntimeError, match="CUDA ops are not built.*VLLM_TARGET_DEVICE=cuda"):
        _extension.load_cuda_ops.__wrapped__()
    (tmp_path / "_C_cuda.so").write_text("not a library")
    with pytest.raises(RuntimeError, match="does not load with torch"):
        _extension.load_cuda_ops.__wrapped__()


@pytest.mark.skipif(
    not _extension.CUDA_LIBRARY.exists() and shutil.which("nvcc") is None,
    reason="the CUDA ops need nvcc to be built",
)
class TestTheCudaLibrary:
    def test_it_loads_on_any_torch(self) -> None:
        _extension.load_cuda_ops()
        schema = str(torch.ops.vllm_cuda.skinny_linear.default._schema)
        assert "Tensor x, Tensor? norm, float eps, bool one_plus, Tensor weight" in schema

    def test_it_is_for_cuda_tensors_only(self) -> None:
        _extension.load_cuda_ops()
        x = torch.zeros(1, 64, dtype=torch.bfloat16)
        with pytest.raises(NotImplementedError, match="CPU"):
            torch.ops.vllm_cuda.skinny_linear(
                x, None, 0.0, False, x, None, None, False, 0, 102400, 1
            )

    def test_it_depends_on_torch_alone(self) -> None:
        """Neither on Python nor on a CUDA runtime or a CUDA build of torch."""
        library = _extension.CUDA_LIBRARY.read_bytes()
        assert b"libtorch_cpu.so" in library
        for foreign in (b"libpython", b"libcudart.so", b"libc10_cuda.so", str(ROOT).encode()):
            assert foreign not in library
