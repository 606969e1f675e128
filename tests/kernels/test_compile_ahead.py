# SPDX-License-Identifier: Apache-2.0
"""Noting launches and compiling them in parallel, with the real compiler and no GPU."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from apriel2_models import make_tensors, save, stochastic
from draft_models import TINY, mtp_tensors, with_mtp, write_eagle3
from tiny_models import tiny_model
from triton import knobs

from tests.forked_python import run_python
from tests.nightly import nightly
from vllm.kernels.triton import compile_lock, compile_log, compiler_start
from vllm.kernels.triton.compile_ahead import ParallelCompilation, Variant, prepare
from vllm.kernels.triton.compile_lock import compiling
from vllm.kernels.triton.compile_log import begin_launcher

pytestmark = pytest.mark.slow

FAMILIES = ("qwen3_5", "qwen3", "llama", "qwen3_5_moe", "deepseek_v4")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    """Locks are files there."""
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / "own")
        yield


def run_compiled(script: str, *arguments: str, cache: Path) -> Any:
    """The JSON that a script of this directory prints, run with the compiler, not interpreted."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = run_python(str(Path(__file__).with_name(script)), *arguments, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_noted_kernels_are_compiled_and_cached(tmp_path: Path) -> None:
    first = run_compiled("compile_ahead_script.py", cache=tmp_path)
    assert [name.rpartition(".")[2] for name in first["noted"]] == ["copy", "copy"]
    assert first["compiled"] == ["copy", "copy"] and first["cached"] == [False, False]
    assert first["ahead"]
    assert first["in memory"] == 2, "a launch finds them without asking the disk"
    assert "no_such_function" in first["error"]
    second = run_compiled("compile_ahead_script.py", cache=tmp_path)
    assert second["cached"] == [True, True] and second["in memory"] == 2


def test_processes_that_start_together_compile_each_kernel_once(tmp_path: Path) -> None:
    done = run_compiled("shared_compilation_script.py", cache=tmp_path)
    variants, found = done["variants"], done["found"]
    assert variants >= 4 and len(found) == 3
    for _, cached, in_memory in found:
        assert len(cached) == in_memory == variants, "every process has every kernel"
    assert sum(cached.count(False) for _, cached, _ in found) == variants


def test_what_another_process_compiles_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    started = threading.Semaphore(0)
    done: list[str] = []

    def compiled(what: str) -> Any:
        done.append(what)
        started.release()

    variants = [Variant("kernel", what, compiled) for what in "abcd"]
    with compiling("kernel b", wait=False) as alone:
        assert alone
        ahead = ParallelCompilation(variants, torch.device("cpu"))
        for _ in range(3):
            assert started.acquire(timeout=60)
        assert done == ["a", "c", "d"]
    ahead.wait()
    assert done == ["a", "c", "d", "b"]


def test_a_disk_without_locks_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    knobs.cache.dir = str(tmp_path / "file")
    monkeypatch.setattr(compile_lock.logger.parent, "propagate", True)
    done: list[str] = []
    variants = [Variant("kernel", what, done.append) for what in "ab"]
    ParallelCompilation(variants, torch.device("cpu")).wait()
    assert sorted(done) == ["a", "b"]
    assert "compiled by every process" in caplog.text


def test_threads_leave_the_compilers_hash_to_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[bool] = []

    def slow_key() -> None:
        at_once.append(compiler_start._starting.locked())
        time.sleep(0.01)

    monkeypatch.setattr("triton.runtime.cache.triton_key", slow_key)
    with ThreadPoolExecutor(4) as threads:
        began = time.monotonic()
        for _ in range(4):
            threads.submit(compiler_start.hash_compiler)
    assert at_once == [True] * 4 and time.monotonic() - began >= 0.04


@pytest.mark.parametrize("installed", [True, False])
def test_the_compiler_starts_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    started = threading.Event()
    monkeypatch.setattr(compiler_start, "_start", started.set)
    monkeypatch.setattr(
        compiler_start, "find_spec", {"triton": object() if installed else None}.get
    )
    compiler_start.start_on_a_thread()
    assert started.wait(60 if installed else 0.05) == installed


@pytest.mark.parametrize(("device", "loads"), [("cuda", 1), ("cpu", 0)])
def test_kernels_are_loaded_where_there_is_a_device(
    device: str, loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = _kernels(monkeypatch)
    prepare(Variant("kernel", "a*fp32", kernels.compile), torch.device(device))
    assert kernels.loaded == ["a*fp32"] * loads


def test_a_launcher_is_loaded_again_only_when_no_other_thread_loads_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python would put it into the module of whichever launcher was loaded last."""
    kernels = _kernels(monkeypatch)
    wanted = ["a*fp32", "b*bf16", "ci1", "di8", "efp64", "f*i32"]
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    variants = [Variant("kernel", what, kernels.compile) for what in wanted]
    ParallelCompilation(variants, torch.device("cuda")).wait()
    assert sorted(kernels.loaded) == wanted
    together, alone = kernels.loaded[:3], kernels.loaded[3:]
    assert sorted(what[1:2] for what in together) == ["*", "f", "i"]
    assert sorted(what[1:2] for what in alone) == ["*", "*", "i"], "a launcher is written in C"
    main = threading.main_thread().name
    assert kernels.threads[3:] == [main] * 3 and main not in kernels.threads[:3]
    kernels.loaded.clear()
    ParallelCompilation(variants[:1], torch.device("cuda")).settle()
    assert kernels.loaded == [], "by its first launch"


def _launched(signature: dict[str, str]) -> threading.Thread:
    """A thread on which Triton compiles a kernel because it is launched."""
    source = SimpleNamespace(name="kernel", signature=signature)
    listener: Any = knobs.compilation.listener
    arguments = {"src": source, "times": SimpleNamespace(total=1), "cache_hit": True}
    thread = threading.Thread(target=listener, kwargs=arguments)
    thread.start()
    return thread


def test_a_launch_that_loads_a_launcher_again_waits_for_what_is_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = _kernels(monkeypatch)
    monkeypatch.setattr(compile_log, "_compilations", [])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    go = threading.Event()

    def compiled_late(what: str) -> Any:
        assert go.wait(20)
        return kernels.compile(what)

    late = [Variant("kernel", what, compiled_late) for what in ("afp32", "bfp64")]
    ahead = ParallelCompilation(late, torch.device("cuda"))
    first = _launched({"x": "i64"})
    first.join(20)
    again = _launched({"y": "i64"})
    again.join(0.05)
    assert not first.is_alive() and again.is_alive()
    go.set()
    again.join(20)
    assert not again.is_alive()
    ahead.wait()


def test_a_compilation_that_fails_keeps_no_launch_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    _kernels(monkeypatch)
    monkeypatch.setattr(compile_log, "_compilations", [])

    def refused(what: str) -> Any:
        raise ValueError("no such function")

    with pytest.raises(ValueError, match="no such function"):
        ParallelCompilation([Variant("kernel", "a*fp32", refused)] * 3, torch.device("cpu")).wait()
    for _ in range(2):
        thread = _launched({"x": "*fp32"})
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_kernel_that_is_compiled_by_its_launch_loads_its_launcher(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(compile_log, "_begun", set())
    monkeypatch.setattr(compile_log, "_compilations", [])
    compile_log.install()
    source = SimpleNamespace(name="kernel", signature={"x": "*fp32", "SIZE": "constexpr"})

    def compiled() -> None:
        if ahead:
            compile_log.ahead_on_this_thread()
        listener: Any = knobs.compilation.listener
        listener(src=source, times=SimpleNamespace(total=1), cache_hit=True)

    thread = threading.Thread(target=compiled)
    thread.start()
    thread.join()
    assert compile_log.compiled() == ["kernel"]
    assert begin_launcher({"y": "*fp32"}) == ahead


@pytest.mark.parametrize("used", [False, True])
def test_launchers_that_were_loaded_before_anyone_listened_may_be_any(
    monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    """All are loaded by the thread that waits, when no other thread loads one."""
    kernels = _kernels(monkeypatch)
    monkeypatch.setattr(compile_log, "_compilations", [])
    monkeypatch.setattr(knobs.compilation, "listener", None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delitem(sys.modules, "__triton_launcher", raising=False)
    if used:
        monkeypatch.setitem(sys.modules, "__triton_launcher", ModuleType("__triton_launcher"))
    compile_log.install.cache_clear()
    variants = [Variant("kernel", what, kernels.compile) for what in ("a*fp32", "bfp64", "ci64")]
    ParallelCompilation(variants, torch.device("cuda")).wait()
    assert sorted(kernels.loaded) == ["a*fp32", "bfp64", "ci64"]
    here = [name == threading.current_thread().name for name in kernels.threads]
    assert here == [used] * 3
    compile_log.install.cache_clear()


class _Kernels:
    """Kernels of one argument, whose type follows the first letter of their specialisation."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.threads: list[str] = []

    def compile(self, specialization: str) -> Any:
        return _Kernel(self, specialization)


class _Kernel:
    def __init__(self, owner: _Kernels, specialization: str) -> None:
        self._owner, self._specialization = owner, specialization
        constant = {"SIZE": "constexpr"} if specialization[0] in "bd" else {}
        self.src = SimpleNamespace(signature={"x": specialization[1:], **constant})

    @property
    def run(self) -> None:
        self._owner.threads.append(threading.current_thread().name)
        self._owner.loaded.append(self._specialization)


def _kernels(monkeypatch: pytest.MonkeyPatch) -> _Kernels:
    monkeypatch.setattr(compile_log, "_begun", set())
    monkeypatch.setattr(compile_log, "_loaded_unseen", False)
    return _Kernels()


@pytest.fixture(scope="module", params=["brief", *nightly("thorough")])
def sweeps(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the sweep found, by family."""
    flags = ["--thorough"] * (request.param == "thorough")
    models = {family: str(tiny_model(family, torch.bfloat16)) for family in FAMILIES}
    cache = tmp_path_factory.mktemp("cache")
    found = run_compiled("variant_sweep.py", *flags, *models.values(), cache=cache)
    return {family: found[path] for family, path in models.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_batch_needs_a_kernel_that_warm_up_does_not_foresee(
    sweeps: dict[str, dict[str, Any]], family: str
) -> None:
    """Lengths, counts and contexts of every kind: none may make another variant of a kernel."""
    found = sweeps[family]
    assert len(found["foreseen"]) >= 8 and found["batches"] > 90
    assert found["unforeseen"] == []


@pytest.mark.parametrize(
    ("method", "ranks"), [("mtp", 1), ("eagle3", 2), *nightly(("draft_model", 1))]
)
def test_a_drafter_is_noted_before_anything_is_sampled(
    tmp_path: Path, method: str, ranks: int
) -> None:
    """Kernels that do not run leave what was in memory: no token id may come from there. Steps
    whose drafts are more or fewer than the next step's need no others."""
    settings: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    target = tiny_model("qwen3_5" if method == "mtp" else "llama", torch.bfloat16)
    if method == "eagle3":
        settings["model"] = str(write_eagle3(tmp_path / "draft", target, TINY))
    elif method == "mtp":
        target = with_mtp(target, tmp_path / "target", mtp_tensors(TINY))
    else:
        settings["model"] = str(target)
    noted = run_compiled(
        "noted_drafter_script.py",
        str(target),
        json.dumps(settings),
        str(ranks),
        cache=tmp_path / "cache",
    )
    assert any("attention" in name for name in noted["foreseen"])
    assert noted["further"] == []


def test_placements_that_are_not_rehearsed_need_no_kernel(tmp_path: Path) -> None:
    """Other numbers and orders of the same mixers launch what those before them did."""
    decoder = stochastic(5)
    supernet = save(tmp_path / "supernet", decoder, make_tensors(decoder))
    placements = [
        "attention,attention,gdn,gdn,attention",
        "kda,kda,kda,kda,kda",
        "attention,gdn,attention,attention,attention",
    ]
    found = run_compiled(
        "placement_kernels_script.py", str(supernet), *placements, cache=tmp_path / "cache"
    )
    assert [one["new"] for one in found] == [True, True, False]
    first, other, again = (one["kernels"] for one in found)
    assert first != other and len(first) > 20
    assert again == first
