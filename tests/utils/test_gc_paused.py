# SPDX-License-Identifier: Apache-2.0
"""Nothing is collected inside the block; afterwards it is as it was."""

from __future__ import annotations

import gc

import pytest

from vllm.utils.gc_paused import gc_paused


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
