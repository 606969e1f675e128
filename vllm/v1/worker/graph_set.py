# SPDX-License-Identifier: Apache-2.0
"""Captures of one kind of step, by size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.compilation.piecewise import Graph, Pieces, alias_memory, capture

#: `prepare(size)` uploads a step of `size` padded tokens; the result runs it: `[size, width]`
Prepare = Callable[[int], Callable[[], Tensor]]


@dataclass(frozen=True)
class CapturedStep:
    """A recorded step and where each replay leaves its output `[size, width]`."""

    pieces: Pieces
    output: Tensor


def coarse_sizes(sizes: list[int]) -> list[int]:
    """The powers of two and the largest, in the order of `sizes` (ascending)."""
    return [size for size in sizes if size == sizes[-1] or size & (size - 1) == 0]


def capture_order(sizes: list[int]) -> list[int]:
    """The coarse sizes, then the rest; each part descending.

    After the first part every batch has a graph that is less than twice too large, if `sizes` have
    the powers of two, and smaller captures find the memory of larger ones to reuse.
    """
    first = coarse_sizes(sizes)
    return first[::-1] + sorted(set(sizes) - set(first), reverse=True)


class GraphSet:
    """Graphs of steps of `sizes` (ascending) tokens; with `split`, in pieces at graph breaks.

    Inside `briefly()` a step launches every kernel, but not for every layer.
    """

    def __init__(
        self,
        sizes: list[int],
        prepare: Prepare,
        new_graph: Callable[[], Graph],
        *,
        split: bool,
        briefly: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._prepare = prepare
        self._briefly = briefly
        self._new_graph = new_graph
        self._split = split
        self._run_before = frozenset(coarse_sizes(sizes))
        self._captured: dict[int, CapturedStep] = {}
        #: captured sizes, ascending
        self.sizes: list[int] = []
        #: sizes to capture, in this order
        self.pending = capture_order(sizes)

    def size_for(self, num_tokens: int) -> int | None:
        """The smallest captured size that holds `num_tokens`, None without one."""
        index = bisect_left(self.sizes, num_tokens)
        return self.sizes[index] if index < len(self.sizes) else None

    def replay(self, size: int) -> Tensor:
        """Run the capture of `size` on the current stream; the next replay of any size overwrites
        the result."""
        captured = self._captured[size]
        captured.pieces.replay()
        return captured.output

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture a pending size.

        A coarse one runs once before, briefly: kernels are then compiled, and what outlives a step
        (libraries' handles, counters) is made outside of any graph. Sizes between them need
        nothing new.
        """
        run = self._prepare(size)
        if size in self._run_before:
            with self._briefly():
                run()
        pieces, output = capture(run, self._new_graph, split=self._split)
        self._captured[size] = CapturedStep(pieces, alias_memory(output))
        self.pending.remove(size)
        insort(self.sizes, size)
