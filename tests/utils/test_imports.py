# SPDX-License-Identifier: Apache-2.0
"""Imports at a start: collected, timed and compiled as little as can be, and found once."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vllm.utils.imports import gc_paused, missing_bytecode, short_turns

pytestmark = pytest.mark.slow


def collections_of(count: int) -> int:
    before = sum(generation["collections"] for generation in gc.get_stats())
    kept = [[i] for i in range(count)]
    del kept
    return sum(generation["collections"] for generation in gc.get_stats()) - before


def test_nothing_is_collected_inside() -> None:
    assert collections_of(200_000) > 0
    with gc_paused():
        assert collections_of(200_000) == 0
    assert collections_of(200_000) > 0


def test_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_failing_import_leaves_it_on() -> None:
    with pytest.raises(ImportError), gc_paused():
        import no_such_module  # noqa: F401
    assert gc.isenabled()


_MOMENTS = 40


def _seconds_beside_python() -> float:
    """How long `_MOMENTS` waits take a thread while this one runs Python without pause."""
    taken: list[float] = []

    def wait() -> None:
        began = time.perf_counter()
        for _ in range(_MOMENTS):
            time.sleep(0)
        taken.append(time.perf_counter() - began)

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        pass
    return taken[0]


def test_a_thread_waits_less_inside() -> None:
    def is_shorter() -> bool:
        outside = _seconds_beside_python()
        with short_turns():
            return _seconds_beside_python() < 0.6 * outside

    # A busy machine makes either longer, now and then.
    assert any(is_shorter() for _ in range(20))


def test_turns_are_as_before_afterwards() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(KeyError), short_turns():
        assert sys.getswitchinterval() < before
        raise KeyError
    assert sys.getswitchinterval() == before


ROOT = Path(__file__).parents[2]
#: prints what is imported when the process starts, and once it has
_SCRIPT = """
import sys, threading
from vllm.v1.engine import spare_process

heavy = ("transformers", "torch", "vllm.config", "vllm.v1.engine.core", "triton")

def start(self):
    print(sorted(set(heavy) & set(sys.modules)))
    assert threading.enumerate() == [threading.main_thread()]

spare_process.SpareProcess.__init__ = start
spare_process.take = lambda: None
with spare_process.prestarted():
    print(sorted(set(heavy) & set(sys.modules)))
"""

_HEAVY = ["torch", "transformers", "vllm.config"]


@pytest.mark.parametrize(("method", "before"), [("fork", _HEAVY), ("spawn", [])])
def test_only_a_process_that_is_forked_waits_for_the_imports(
    method: str, before: list[str]
) -> None:
    """It has them from its parent; one that is spawned imports them itself, at the same time."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=os.environ | {"VLLM_WORKER_MULTIPROC_METHOD": method},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert done.stdout.splitlines() == [str(before), str(_HEAVY)]


NAME = "module_that_tests_import"


def import_it(folder: Path, monkeypatch: pytest.MonkeyPatch, write: bool) -> None:
    (folder / f"{NAME}.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", not write)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    importlib.import_module(NAME)
    monkeypatch.setitem(sys.modules, NAME, sys.modules[NAME])


def test_compiled_modules_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_it(tmp_path, monkeypatch, write=True)
    assert missing_bytecode(NAME) is None


def test_who_forbids_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_it(tmp_path, monkeypatch, write=False)
    assert missing_bytecode(NAME) == "PYTHONDONTWRITEBYTECODE is set"


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__pycache__").write_text("in the way")
    import_it(tmp_path, monkeypatch, write=True)
    assert missing_bytecode(NAME) == f"{tmp_path / '__pycache__'} cannot be written"


def test_what_is_not_imported_costs_nothing() -> None:
    assert missing_bytecode("no_such_module") is None
