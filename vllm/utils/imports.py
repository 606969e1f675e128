# SPDX-License-Identifier: Apache-2.0
"""Imports at a start: what both processes need, in the least time. Imports nothing heavy itself."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: what a front end and an engine core both import, for most of a start's time beside the device;
#: transformers before torch, which it does not import by itself
_HEAVY = (
    "transformers",
    "torch",
    "transformers.models.auto.configuration_auto",
    "vllm.config",
)
#: a tenth of Python's own
_TURN_S = 0.0005


def import_heavy_modules() -> None:
    """Import torch, transformers and what a configuration is made of."""
    with gc_paused():
        for module in _HEAVY:
            importlib.import_module(module)


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


@contextmanager
def short_turns() -> Iterator[None]:
    """Inside the block a thread that needs Python for a moment gets it within half a millisecond.

    Else it waits 5 ms each time while another one imports modules, and a start's helpers (for the
    device, the disk, a compiler) need it hundreds of times.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def missing_bytecode(package: str = "torch") -> str | None:
    """Why an imported package has no compiled files on disk, or None: it has, or is not imported.

    Compiling torch and transformers takes longer than everything else that importing them does.
    """
    module = sys.modules.get(package)
    spec = None if module is None else module.__spec__
    if spec is None or spec.cached is None or os.path.exists(spec.cached):
        return None
    if sys.dont_write_bytecode:
        return "PYTHONDONTWRITEBYTECODE is set"
    return f"{os.path.dirname(spec.cached)} cannot be written"
