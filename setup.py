# SPDX-License-Identifier: Apache-2.0
"""Build of the wheel and of the C++ ops, which CMake compiles.

`VLLM_TARGET_DEVICE` chooses what is compiled. `cpu` (the default): the CPU ops
(`vllm/_C_cpu.so`) and, where nvcc is found, the CUDA ops (`vllm/_C_cuda.so`), whatever torch was
built for. `cuda`: both, and nvcc is required. `empty`: nothing. nvcc is `$CUDACXX`, else the one
on `PATH`, in `$CUDA_HOME/bin` or in `/usr/local/cuda/bin`. `MAX_JOBS` bounds the parallel
compilers.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).parent.resolve()
TARGETS = ("cpu", "cuda", "empty")


def package_version() -> str:
    """`__version__` of vllm/version.py, read without importing the package."""
    text = (ROOT / "vllm" / "version.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise SetupError('vllm/version.py has no line __version__ = "..."')
    return found.group(1)


def target_device() -> str:
    target = os.environ.get("VLLM_TARGET_DEVICE", "cpu")
    if target not in TARGETS:
        raise SystemExit(
            f"error: VLLM_TARGET_DEVICE={target} is unknown; use one of {', '.join(TARGETS)}"
        )
    return target


def find_torch() -> Path:
    """Directory of the installed torch, found and checked without importing it."""
    advice = (
        "building the CPU ops needs torch>=2.11 in the build environment{found}: install it and"
        " pass --no-build-isolation, or set VLLM_TARGET_DEVICE=empty"
    )
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CompileError(advice.format(found=""))
    torch = Path(spec.origin).parent
    version = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", (torch / "version.py").read_text())
    if version is None or (int(version[2]), int(version[3])) < (2, 11):
        found = version[1] if version else "an unknown version"
        raise CompileError(advice.format(found=f" and found {found}"))
    return torch


def find_cmake() -> str:
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if cmake is None:
        raise CompileError(
            "building the CPU ops needs cmake>=3.20 on PATH (pip install cmake),"
            " or set VLLM_TARGET_DEVICE=empty"
        )
    return cmake


def find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        compiler = shutil.which(name)
        if compiler is not None:
            return compiler
    raise CompileError(
        f"building the CPU ops needs a C++20 compiler ({wanted or 'c++, g++ or clang++'} is not on"
        " PATH), or set VLLM_TARGET_DEVICE=empty"
    )


def find_nvcc() -> str | None:
    """The CUDA compiler, or None where there is none and none was asked for."""
    wanted = os.environ.get("CUDACXX")
    if wanted:
        nvcc = shutil.which(wanted)
        if nvcc is None:
            raise CompileError(f"CUDACXX={wanted} is not an executable file")
        return nvcc
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))


def extensions(target: str) -> list[Extension]:
    """What `target` compiles on this machine."""
    if target == "empty":
        return []
    try:
        nvcc = find_nvcc()
    except CompileError as error:  # outside of a command, setuptools would show a trace
        raise SystemExit(f"error: {error}") from None
    cpu, cuda = (Extension(f"vllm.{name}", sources=[]) for name in ("_C_cpu", "_C_cuda"))
    return [cpu] if target == "cpu" and nvcc is None else [cpu, cuda]


def num_jobs() -> int:
    """Compilers at once."""
    wanted = os.environ.get("MAX_JOBS", "")
    if wanted and not (wanted.isdecimal() and int(wanted) > 0):
        raise CompileError(f"MAX_JOBS={wanted} is no number of compilers: give 1 or more")
    return int(wanted) if wanted else os.cpu_count() or 1


def forget_other_compilers(build: Path, compilers: dict[str, str]) -> None:
    """Remove a build of another compiler: CMake would look for it again, without its settings."""
    cache = build / "CMakeCache.txt"
    if not cache.exists():
        return
    found = dict(re.findall(r"^(\w+):\w+=(.+)$", cache.read_text(), re.MULTILINE))
    if any(found.get(name, path) != path for name, path in compilers.items() if path):
        shutil.rmtree(build)


class CMakeBuild(build_ext):
    """Configures and builds one CMake target per extension; rebuilds only what changed."""

    def get_ext_filename(self, fullname: str) -> str:
        """No Python tag: the library has no Python linkage."""
        return str(Path(*fullname.split("."))) + ".so"

    def run(self) -> None:
        if find_nvcc() is None:
            if target_device() == "cuda":
                raise CompileError(
                    "VLLM_TARGET_DEVICE=cuda needs nvcc (CUDA 12 or later) on PATH, in"
                    " $CUDA_HOME/bin or named by CUDACXX; VLLM_TARGET_DEVICE=cpu builds without it"
                )
            print("the CUDA ops (vllm/_C_cuda.so) are left out: nvcc is not installed")
        super().run()

    def build_extension(self, ext: Extension) -> None:
        torch, cmake, compiler = find_torch(), find_cmake(), find_compiler()
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        ninja = shutil.which("ninja") or shutil.which(
            "ninja", path=str(Path(sys.executable).parent)
        )
        build = ROOT / "build" / ("cmake-ninja" if ninja else "cmake-make")
        nvcc = find_nvcc() or ""
        forget_other_compilers(build, {"CMAKE_CXX_COMPILER": compiler, "VLLM_CUDA": nvcc})
        build.mkdir(parents=True, exist_ok=True)
        generator = (
            ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else ["-G", "Unix Makefiles"]
        )
        jobs = str(num_jobs())
        self.run_cmake(
            [cmake, "-S", str(ROOT), "-B", str(build), *generator]
            + [f"-DVLLM_TORCH_DIR={torch}", f"-DCMAKE_CXX_COMPILER={compiler}"]
            + [f"-DVLLM_CUDA={nvcc}"]
        )
        self.run_cmake([cmake, "--build", str(build), "--target", output.stem, "--parallel", jobs])
        output.parent.mkdir(parents=True, exist_ok=True)
        # A running process may have the old library mapped: replace the file, never rewrite it.
        staged = output.with_suffix(".so.tmp")
        shutil.copyfile(build / output.name, staged)
        staged.replace(output)

    def run_cmake(self, command: list[str]) -> None:
        finished = subprocess.run(command)
        if finished.returncode:
            raise CompileError(f"`{' '.join(command)}` failed; its output is above")


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3: the library is native but has no Python linkage."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (
            ("py3", "none", platform) if self.distribution.ext_modules else (python, abi, platform)
        )


setup(
    version=package_version(),
    ext_modules=extensions(target_device()),
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
