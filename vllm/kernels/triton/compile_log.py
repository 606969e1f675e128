# SPDX-License-Identifier: Apache-2.0
"""Which kernels Triton compiled in this process, in order. A step must never add to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from triton import knobs

from vllm.kernels.triton.launcher_modules import begin_launcher


@dataclass(frozen=True)
class Compilation:
    """One variant of a kernel became launchable.

    `cached`: read from the cache on disk. `ahead`: before anything tried to launch it.
    """

    kernel: str
    seconds: float
    cached: bool
    ahead: bool


_compilations: list[Compilation] = []
_lock = threading.Lock()
_thread = threading.local()


@cache
def install() -> None:
    """Listen to Triton from now on, beside whatever listens already."""
    earlier: Callable[..., None] | None = knobs.compilation.listener

    def listen(**event: Any) -> None:
        if earlier is not None:
            earlier(**event)
        one = Compilation(
            event["src"].name,
            event["times"].total / 1e6,
            cached=event["cache_hit"],
            ahead="ahead" in vars(_thread),
        )
        with _lock:
            _compilations.append(one)
        if not one.ahead:  # it is about to be launched
            begin_launcher(event["src"].signature)

    knobs.compilation.listener = listen


def ahead_on_this_thread() -> None:
    """What this thread compiles from now on is not needed yet."""
    _thread.ahead = True


def compilations() -> list[Compilation]:
    """Everything since `install`, in the order it was done."""
    with _lock:
        return list(_compilations)


def compiled() -> list[str]:
    """The names of the kernels, one entry per variant, from the disk cache or not."""
    return [one.kernel for one in compilations()]
