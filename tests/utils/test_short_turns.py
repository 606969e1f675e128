# SPDX-License-Identifier: Apache-2.0
"""A thread that needs Python for moments gets it soon, and only inside the block."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from vllm.utils.short_turns import short_turns

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
    outside = _seconds_beside_python()
    with short_turns():
        inside = min(_seconds_beside_python() for _ in range(3))
    assert inside < 0.6 * outside


def test_turns_are_as_before_afterwards() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(KeyError), short_turns():
        assert sys.getswitchinterval() < before
        raise KeyError
    assert sys.getswitchinterval() == before
