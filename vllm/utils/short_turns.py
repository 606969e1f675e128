# SPDX-License-Identifier: Apache-2.0
"""Threads that mostly wait for the device, the disk or a compiler beside one that runs Python."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: a tenth of Python's own
_TURN_S = 0.0005


@contextmanager
def short_turns() -> Iterator[None]:
    """Inside the block a thread that needs Python for a moment gets it within half a millisecond.

    Else it waits 5 ms each time while another one imports modules, and a start's helpers need it
    hundreds of times.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
