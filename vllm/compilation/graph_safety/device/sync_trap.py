# SPDX-License-Identifier: Apache-2.0
"""Catches a host that waits for the device, also where torch does not see it.

`torch.cuda.set_sync_debug_mode` knows the waits of torch's own ops. A kernel's launcher or a
library that waits is found another way: the stream is kept busy, and a step that returns only when
it is idle has waited. Where, says a thread that looks at the host meanwhile.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from vllm.compilation.graph_safety.simulator.spots import Spot, spot_of_frame

#: how long the stream is kept busy, longer than any step takes to launch
BUSY_S = 0.5
#: clock ticks per second that are enough for that on every GPU
_TICKS_PER_S = 2_000_000_000
_LOOKS_EVERY_S = 0.01


class BusyStream(Protocol):
    """A stream that can be kept busy."""

    def occupy(self) -> None:
        """Queue work of about `BUSY_S`."""
        ...

    def is_busy(self) -> bool:
        """Whether that work still runs; does not wait."""
        ...


class CurrentStream:
    """The current CUDA stream."""

    def __init__(self) -> None:
        self._done = torch.cuda.Event()

    def occupy(self) -> None:
        torch.cuda._sleep(int(BUSY_S * _TICKS_PER_S))
        self._done.record()

    def is_busy(self) -> bool:
        return not self._done.query()


class Waits:
    """What a trap found: None, or where the host waited."""

    spot: Spot | None = None


@contextmanager
def waits_trapped(stream: BusyStream) -> Iterator[Waits]:
    """Run the block on a busy stream; afterwards `Waits.spot` is where its host waited, if it did.

    A block that takes longer than `BUSY_S` to launch counts as waiting; run it once before.
    """
    waits, host = Waits(), threading.get_ident()
    seen: Counter[Spot] = Counter()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOKS_EVERY_S):
            seen[spot_of_frame(sys._current_frames()[host])] += 1

    watcher = threading.Thread(target=look, daemon=True)
    stream.occupy()
    watcher.start()
    try:
        yield waits
        was_busy = stream.is_busy()
    finally:
        ended.set()
        watcher.join()
    if not was_busy and seen:
        waits.spot = seen.most_common(1)[0][0]


@contextmanager
def torch_waits_raise() -> Iterator[None]:
    """Inside the block an op of torch that waits for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def torch_waits_warn(waited: Callable[[], None]) -> Iterator[None]:
    """Inside the block `waited` is called where an op of torch has waited for the device."""
    before, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning

    def shown(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            waited()
        else:
            show(message, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.showwarning = shown
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
