# SPDX-License-Identifier: Apache-2.0
"""Blocks between the arena and a segment of staging memory, where they lie side by side.

Copies run on two side streams, one per direction; whoever calls waits for them, so call from a
thread that may wait. The memory is registered with the transport once.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import Places
from vllm.v1.kv_cache_interface import ArenaPlan

#: what is copied at a time where bytes are so aligned
_WORD = torch.int64
#: of the arena's device, at a time, where the segment lies elsewhere
_BOUNCE_BYTES = 2**24
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
            for group, blocks, held in self._held(places, segment):
                lying = self._lying(group, held)
                chosen = torch.tensor(blocks, device=lying.device)
                for some, part in self._pieces(lying, chosen, held.view(lying.dtype)):
                    if not to_staging:
                        lying.index_copy_(0, some, part.to(lying.device, non_blocking=True))
                    elif part.device == lying.device:
                        torch.index_select(lying, 0, some, out=part)
                    else:
                        part.copy_(lying[some], non_blocking=True)
            if stream is not None:
                stream.synchronize()

    @staticmethod
    def _pieces(lying: Tensor, chosen: Tensor, held: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """`chosen` and `held`, at most so many blocks at a time as may pass through the device."""
        if held.device == lying.device:
            return [(chosen, held)]
        count = max(1, _BOUNCE_BYTES // (held.shape[1] * held.itemsize))
        return zip(chosen.split(count), held.split(count), strict=True)

    def _held(self, places: Places, segment: Tensor) -> Iterator[tuple[int, list[int], Tensor]]:
        """Groups that have blocks, these, and their part of a segment, `uint8 [blocks, bytes]`."""
        start = 0
        for group, own in enumerate(places):
            if own:
                size = self.plan.groups[group].block_bytes
                end = start + len(own) * size
                yield group, [place.block for place in own], segment[start:end].view(-1, size)
                start = end

    def _lying(self, group: int, held: Tensor) -> Tensor:
        """All of the arena as blocks `[blocks, words]` of a group, in words as long as both sides
        allow."""
        size, stride = held.shape[1], self.plan.block_stride(group)
        arena = self._arena
        at = size, stride, len(arena), held.data_ptr(), arena.data_ptr()
        if all(number % _WORD.itemsize == 0 for number in at):
            arena = arena.view(_WORD)
        size, stride = size // arena.itemsize, stride // arena.itemsize
        return arena.as_strided((self.plan.num_blocks(group), size), (stride, 1))
