# SPDX-License-Identifier: Apache-2.0
"""Blocks between the arena and a segment of staging memory, where they lie side by side.

Copies run on two side streams, one per direction; whoever calls waits for them, so call from a
thread that may wait. The memory is registered with the transport once.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.arena_connector import runs
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import Places
from vllm.v1.kv_cache_interface import ArenaPlan

#: group, block, bytes from the segment's start, bytes
Part = tuple[int, int, int, int]


def parts(plan: ArenaPlan, places: Places) -> Iterator[Part]:
    """The segment that holds these blocks, one after another, without padding."""
    start = 0
    for group, own in enumerate(places):
        size = plan.groups[group].block_bytes
        for place in own:
            yield group, place.block, start, size
            start += size


def segment_bytes(plan: ArenaPlan, places: Places) -> int:
    return sum(plan.groups[g].block_bytes * len(own) for g, own in enumerate(places))


class BlockCopies:
    """One worker's copies."""

    def __init__(self, arena: Tensor, plan: ArenaPlan) -> None:
        self.plan = plan
        self._arena = arena
        self._out = torch.cuda.Stream(arena.device) if arena.is_cuda else None
        self._in = torch.cuda.Stream(arena.device) if arena.is_cuda else None

    def mark(self) -> torch.cuda.Event | None:
        """After all that was launched so far; for `after`."""
        if not self._arena.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._arena.device))
        return event

    def to_staging(self, places: Places, segment: Tensor, after: torch.cuda.Event | None) -> None:
        """Returns when `segment`, `uint8 [bytes]`, holds the blocks."""
        self._copy(places, segment, after, self._out, to_staging=True)

    def to_arena(self, places: Places, segment: Tensor, after: torch.cuda.Event | None) -> None:
        """Returns when the blocks are as in `segment`, `uint8 [bytes]`."""
        self._copy(places, segment, after, self._in, to_staging=False)

    def _copy(
        self,
        places: Places,
        segment: Tensor,
        after: torch.cuda.Event | None,
        stream: torch.cuda.Stream | None,
        to_staging: bool,
    ) -> None:
        with torch.cuda.stream(stream):
            if stream is not None and after is not None:
                stream.wait_event(after)
            for first, start, size in self._spans(places):
                there, here = self._arena[first : first + size], segment[start : start + size]
                target, source = (here, there) if to_staging else (there, here)
                target.copy_(source, non_blocking=True)
            if stream is not None:
                stream.synchronize()

    def _spans(self, places: Places) -> Iterator[tuple[int, int, int]]:
        """Bytes from the arena's start, from the segment's, and how many lie so in both."""
        starts = [start for _, _, start, _ in parts(self.plan, places)]
        nth = itertools.count()
        placed = ((g, place.block, next(nth)) for g, own in enumerate(places) for place in own)
        for group, block, first, count in runs(placed):
            size, stride = self.plan.groups[group].block_bytes, self.plan.block_stride(group)
            if size == stride:
                yield block * stride, starts[first], count * size
            else:  # the arena has padding between them
                for i in range(count):
                    yield (block + i) * stride, starts[first + i], size
