# SPDX-License-Identifier: Apache-2.0
"""Imports without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Inside the block Python collects nothing by itself.

    What an import makes is there to stay, and a collector that looks at it again and again, as it
    grows, takes a fifth of the time of importing torch and transformers.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
