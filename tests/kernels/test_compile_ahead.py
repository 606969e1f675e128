# SPDX-License-Identifier: Apache-2.0
"""Noting launches and compiling them in parallel, with the real compiler and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.kernels.triton import compile_ahead
from vllm.kernels.triton.compile_ahead import Variant, prepare

REPOSITORY = Path(__file__).parents[2]
PATH = (str(REPOSITORY), str(REPOSITORY / "tests"))


def run_compiled(script: str, *arguments: str, cache: Path) -> Any:
    """The JSON that a script of this directory prints, run with the compiler, not interpreted."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join(
                [*PATH, *inherited.get("PYTHONPATH", "").split(os.pathsep)]
            ),
            "TRITON_CACHE_DIR": str(cache),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
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


def test_threads_leave_the_compilers_hash_to_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[bool] = []

    def slow_key() -> None:
        at_once.append(compile_ahead._hashing.locked())
        time.sleep(0.01)

    monkeypatch.setattr(compile_ahead, "triton_key", slow_key)
    with ThreadPoolExecutor(4) as threads:
        began = time.monotonic()
        for _ in range(4):
            threads.submit(compile_ahead.hash_compiler)
    assert at_once == [True] * 4 and time.monotonic() - began >= 0.04


@pytest.mark.parametrize(("device", "loads"), [("cuda", 1), ("cpu", 0)])
def test_kernels_are_loaded_where_there_is_a_device(device: str, loads: int) -> None:
    loaded: list[str] = []

    class Kernel:
        def __init__(self, specialization: str) -> None:
            self.specialization = specialization

        @property
        def run(self) -> None:
            loaded.append(self.specialization)

    prepare(Variant("kernel", "what", Kernel), torch.device(device))
    assert loaded == ["what"] * loads


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3", "llama"])
def test_no_batch_needs_a_kernel_that_warm_up_does_not_foresee(tmp_path: Path, family: str) -> None:
    """Lengths, counts and contexts of every kind: none may make another variant of a kernel."""
    found = run_compiled("variant_sweep.py", family, cache=tmp_path)
    assert len(found["foreseen"]) >= 8 and found["batches"] > 100
    assert found["unforeseen"] == []
