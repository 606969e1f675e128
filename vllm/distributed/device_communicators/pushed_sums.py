# SPDX-License-Identifier: Apache-2.0
"""Large sums of two GPUs of one host, pushed by copy engines while the rest is multiplied.

The rows of a product are cut into pieces. Each rank pushes a piece of its part to the other as soon
as it is there, and the norm that reads the branch adds both parts. That takes no multiprocessors,
so that the next piece is multiplied meanwhile.

Nothing waits at the end of a sum. One rank may be at the next sum while the other still reads: sums
take turns in two places, and a part of the next sum tells that this one has been read, for its
product comes after that in the order of the other's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from vllm.compilation.monitor import is_capturing
from vllm.kernels.all_reduce.pair_norm import add_pair_norm, takes_pair
from vllm.kernels.residual_stream import Norm
from vllm.platforms import current_platform

#: pieces of a product. With more, products are small and flags many
PIECES = 2
#: bytes of a sum that is pushed: what a smaller one has to wait for is more than what it hides
SMALLEST = 8 * 2**20
_ALIGNMENT = 16


class PushMemory(Protocol):
    """This rank's memory that the other one pushes to, and that one's; see `PeerMemory`."""

    @property
    def rank(self) -> int: ...

    def pushed(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor: ...

    def push(self, rows: Tensor, receiver: int, offset: int) -> None: ...

    def signal(self, flag: int, value: int) -> None: ...

    def wait_for(self, flag: int, value: int) -> None: ...


class Lane(Protocol):
    """Where pushes run beside the current stream."""

    def sending(self) -> AbstractContextManager[None]:
        """Inside the block work comes after what the current stream has been given so far."""
        ...

    def await_sent(self) -> None:
        """What the current stream is given from here on comes after all that was sent."""
        ...


class DeviceLane:
    """A stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def sending(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def await_sent(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)


@dataclass(frozen=True)
class LargestSum:
    """The most `rows` of a product and its `columns`, of `element_bytes` each."""

    rows: int
    columns: int
    element_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.columns * self.element_bytes

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def push_bytes(self) -> int:
        """What each rank needs for the other's parts, of two sums."""
        return 2 * self.num_bytes

    @property
    def is_worth_pushing(self) -> bool:
        return self.num_bytes >= SMALLEST and self.row_bytes % _ALIGNMENT == 0


def runs(rows: int, count: int) -> list[slice]:
    """`count` runs of nearly the same length, one after the other, of all `rows`."""
    cuts = [rows * i // count for i in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(cuts)]


class PushedSums:
    """Sums of products that `takes` them. Both ranks call the same sums in the same order."""

    def __init__(self, memory: PushMemory, lane: Lane, largest: LargestSum) -> None:
        self._memory, self._lane, self._largest = memory, lane, largest
        self._count = 0
        self._newest: PushedPair | None = None

    def takes(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether the sum of such products is pushed: the same on both ranks. Never in a graph,
        whose replays would tell old numbers."""
        largest = self._largest
        return (
            rows * columns * dtype.itemsize >= SMALLEST
            and rows <= largest.rows
            and (columns, dtype.itemsize) == (largest.columns, largest.element_bytes)
            and not is_capturing()
        )

    def begin(
        self, rows: int, dtype: torch.dtype, product: Callable[[slice], Tensor]
    ) -> PushedPair:
        """`product(run)`: this rank's part of a run of `rows`, dense `[len(run), columns]`."""
        if self._newest is not None:
            self._newest.make_room()
        self._count += 1
        memory, largest = self._memory, self._largest
        place = self._count % 2 * largest.num_bytes
        parts = []
        for piece, run in enumerate(runs(rows, PIECES)):
            part = product(run)
            parts.append(part)
            with self._lane.sending():
                memory.push(part, 1 - memory.rank, place + run.start * largest.row_bytes)
                memory.signal(piece, self._count)
        others = memory.pushed(place, rows, largest.columns, dtype)
        self._newest = PushedPair(memory, self._lane, others, self._count, parts)
        return self._newest


class PushedPair:
    """This rank's `parts` of a product and the other one's, which arrive in `others [rows,
    columns]`: see `BranchParts`."""

    def __init__(
        self, memory: PushMemory, lane: Lane, others: Tensor, count: int, parts: list[Tensor]
    ) -> None:
        self._memory, self._lane, self._count = memory, lane, count
        self._others, self._parts = others, parts
        #: the sum, if anybody needs it by itself
        self._kept: list[Tensor] = []
        self._was_read = False

    def sum(self) -> Tensor:
        if not self._kept:
            # Two numbers have one sum, in whatever order.
            self._kept.append(torch.cat([part + other for _, part, other in self._arriving()]))
            self._end()
        return self._kept[0]

    def sum_add_norm(self, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if self._kept or not takes_pair(residual):
            return current_platform.kernels.fused_add_rms_norm(
                self.sum(), residual, norm.weight, norm.eps, one_plus=norm.one_plus
            )
        out, total = torch.empty_like(residual), torch.empty_like(residual)
        for run, part, other in self._arriving():
            add_pair_norm(part, other, residual[run], norm, out[run], total[run])
        self._end()
        return out, total

    def make_room(self) -> None:
        """For the sums that follow: keep what nobody has read yet."""
        if not self._was_read:
            self.sum()

    def _arriving(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Each piece, this rank's part of it and the other's, once that is here."""
        if self._was_read:
            raise RuntimeError("a branch is read for a second time, and its parts are gone")
        pieces = runs(len(self._others), PIECES)
        for piece, (run, part) in enumerate(zip(pieces, self._parts, strict=True)):
            self._memory.wait_for(piece, self._count)
            yield run, part, self._others[run]

    def _end(self) -> None:
        """What the parts take is free once they have been sent."""
        self._lane.await_sent()
        self._parts.clear()
        self._was_read = True
