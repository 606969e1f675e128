# SPDX-License-Identifier: Apache-2.0
"""Interrupts (SIGINT) while processes begin and import. Imports nothing heavy.

A terminal sends them to all processes of a command: the first one answers, and ends the others.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_end_too: list[Callable[[], None]] = []


def end_too(end: Callable[[], None]) -> None:
    """`end` is called where an interrupt ends this process at once."""
    _end_too.append(end)


@contextmanager
def interrupts_end() -> Iterator[None]:
    """Inside the block, until another handler is set, an interrupt ends this process at once, with
    status 130. It has nothing to clean up then: it imports modules. By default an exception would
    be raised, which Python drops in finalisers, of which imports run many.

    Nothing changes where interrupts are ignored or handled already.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        interrupts_raise()


def interrupts_raise() -> None:
    """From now on they raise KeyboardInterrupt again, if `interrupts_end` has changed that."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    try:
        for end in _end_too:
            end()
    finally:
        os._exit(128 + number)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Inside the block an interrupt of this thread waits for the block's end. A process that is
    started there begins with that, until `ignore_interrupts`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Of a process that another one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
