# SPDX-License-Identifier: Apache-2.0
"""Which kernels Triton compiled in this process, in order, and which launchers it began to load.

A step must never add to either. Triton makes a kernel's launcher an extension module, and all of
them have one name. When such a module is loaded again, for another kernel with arguments of the
same types, Python puts it into the module object of that name that was made last, whoever is still
about to read that one: a kernel would get another's launcher. Different launchers may be loaded at
once, each for the first time. In a process that used kernels before `install`, nobody knows which
would be loaded for the first time, and they are loaded one after another.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from triton import knobs


@dataclass(frozen=True)
class Compilation:
    """One variant of a kernel became launchable.

    `cached`: read from the cache on disk. `ahead`: before anything tried to launch it.
    """

    kernel: str
    seconds: float
    cached: bool
    ahead: bool


_CONSTANT = "constexpr"
_LAUNCHER_MODULE = "__triton_launcher"
_SAME_IN_C = {"i1": "i8", "u1": "u8", "f32": "fp32"}

_compilations: list[Compilation] = []
_begun: set[tuple[str, ...]] = set()
#: Triton loaded launchers before anyone listened
_loaded_unseen = False
_lock = threading.Lock()
_ahead_done = threading.Condition()
_ahead_left = 0
_thread = threading.local()


@cache
def install() -> None:
    """Listen to Triton from now on, beside whatever listens already."""
    global _loaded_unseen
    _loaded_unseen = _LAUNCHER_MODULE in sys.modules
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
        # A kernel that is not compiled ahead is about to be launched.
        if not one.ahead and not begin_launcher(event["src"].signature):
            wait_for_ahead()

    knobs.compilation.listener = listen


def ahead_on_this_thread() -> None:
    """What this thread compiles from now on is not needed yet."""
    _thread.ahead = True


@contextmanager
def ahead_job() -> Iterator[None]:
    """Inside the block this thread compiles, and may load, a kernel that `begin_ahead` counted."""
    global _ahead_left
    try:
        yield
    finally:
        with _ahead_done:
            _ahead_left -= 1
            _ahead_done.notify_all()


def begin_ahead(kernels: int) -> None:
    """So many kernels are about to be compiled ahead, each in an `ahead_job`."""
    global _ahead_left
    with _ahead_done:
        _ahead_left += kernels


def wait_for_ahead() -> None:
    """Block until no kernel is being compiled ahead, so that no thread loads a launcher."""
    with _ahead_done:
        _ahead_done.wait_for(lambda: _ahead_left == 0)


def compilations() -> list[Compilation]:
    """Everything since `install`, in the order it was done."""
    with _lock:
        return list(_compilations)


def compiled() -> list[str]:
    """The names of the kernels, one entry per variant, from the disk cache or not."""
    return [one.kernel for one in compilations()]


def begin_launcher(signature: Mapping[Any, Any]) -> bool:
    """Whether nobody in this process can have begun to load the launcher of a kernel with these
    types of arguments; from now on somebody has.

    Constants are no arguments of a launcher, and it is the same for pointers to anything. Types
    that this takes for equal may differ: then a launcher is loaded later than it could be.
    """
    types = launcher_types(signature)
    with _lock:
        first = types not in _begun
        _begun.add(types)
    return first and not _loaded_unseen


def launcher_types(signature: Mapping[Any, Any]) -> tuple[str, ...]:
    """Of its arguments; kernels with equal ones have the same launcher."""
    return tuple(_in_c(str(kind)) for kind in signature.values() if kind != _CONSTANT)


def _in_c(kind: str) -> str:
    """What a launcher, which is written in C, makes of a type."""
    return "*" if kind.startswith("*") else _SAME_IN_C.get(kind, kind)
