# SPDX-License-Identifier: Apache-2.0
"""Large sums over the GPUs of one host, pushed by copy engines while the rest is multiplied.

The rows of a product are cut into pieces. Two ranks push each piece to each other as soon as it is
there, and the norm that reads the branch adds both parts. That takes no multiprocessors, so that
the next piece is multiplied meanwhile. Of more ranks each pushes to every other the rows that the
other adds up, adds up its own, and pushes these sums to all, which is less to send.

Nothing waits at the end of a sum. Where ranks add up rows for each other, a rank pushes nothing of
the next sum before it has read this one's results, for its next product comes after, in the order
of its stream; so whoever gets a part of the next sum may write to where this one's parts and
results were. Of two ranks one may be at the next sum while the other still reads: their sums take
turns in two places, and a part of the next sum tells that this one has been read.
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
    """This rank's memory that the others push to, and theirs; see `PeerMemory`."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def pushed(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor: ...

    def push(self, rows: Tensor, receiver: int, offset: int) -> None: ...

    def signal(self, flag: int, value: int) -> None: ...

    def wait_for(self, flag: int, value: int) -> None: ...

    def add(self, own: Tensor, inbox: int, stride: int, out: int) -> None: ...


class Lanes(Protocol):
    """Where pushes and additions run beside the current stream."""

    def sending(self) -> AbstractContextManager[None]:
        """Inside the block work comes after what the current stream has been given so far."""
        ...

    def adding(self) -> AbstractContextManager[None]:
        """Inside the block work waits for nothing but flags."""
        ...

    def await_sent(self) -> None:
        """What the current stream is given from here on comes after all that was sent."""
        ...


class DeviceLanes:
    """Two streams of a device; what they run comes before products that have not begun."""

    def __init__(self, device: torch.device) -> None:
        self._sending, self._adding = (torch.cuda.Stream(device, priority=-1) for _ in range(2))

    @contextmanager
    def sending(self) -> Iterator[None]:
        self._sending.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._sending):
            yield

    @contextmanager
    def adding(self) -> Iterator[None]:
        with torch.cuda.stream(self._adding):
            yield

    def await_sent(self) -> None:
        torch.cuda.current_stream().wait_stream(self._sending)


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
    def is_worth_pushing(self) -> bool:
        return self.num_bytes >= SMALLEST and self.row_bytes % _ALIGNMENT == 0

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    def part_bytes(self, ranks: int) -> int:
        """Of one rank's part of what another one adds up: each piece is cut anew."""
        return (-(-self.rows // ranks) + PIECES) * self.row_bytes

    def bytes_for(self, ranks: int) -> int:
        """What each rank needs: of two ranks, for the other's parts of two sums; of more, for the
        sum and then for the parts of all ranks."""
        return self.num_bytes + (self.num_bytes if ranks == 2 else ranks * self.part_bytes(ranks))


def runs(begin: int, end: int, count: int) -> list[slice]:
    """`count` runs of nearly the same length, one after the other, from `begin` to `end`."""
    cuts = [begin + (end - begin) * i // count for i in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(cuts)]


class PushedSums:
    """Sums of products that `takes` them. All ranks call the same sums in the same order."""

    def __init__(self, memory: PushMemory, lanes: Lanes, largest: LargestSum) -> None:
        self._memory, self._lanes, self._largest = memory, lanes, largest
        self._count = 0
        self._newest: PushedPart | PushedPair | None = None

    def takes(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether the sum of such products is pushed: the same on all ranks. Never in a graph,
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
    ) -> PushedPart | PushedPair:
        """`product(run)`: this rank's part of a run of `rows`, dense `[len(run), columns]`."""
        if self._newest is not None:
            self._newest.make_room()
        self._count += 1
        begin = self._exchange if self._memory.ranks == 2 else self._share_out
        self._newest = begin(rows, dtype, product)
        return self._newest

    def _exchange(
        self, rows: int, dtype: torch.dtype, product: Callable[[slice], Tensor]
    ) -> PushedPair:
        memory, largest = self._memory, self._largest
        place = self._count % 2 * largest.num_bytes
        others = memory.pushed(place, rows, largest.columns, dtype)
        parts = []
        for index, piece in enumerate(runs(0, rows, PIECES)):
            part = product(piece)
            parts.append(part)
            with self._lanes.sending():
                memory.push(part, 1 - memory.rank, place + piece.start * largest.row_bytes)
                memory.signal(_parts_of(index), self._count)
        return PushedPair(memory, self._lanes, others, self._count, parts)

    def _share_out(
        self, rows: int, dtype: torch.dtype, product: Callable[[slice], Tensor]
    ) -> PushedPart:
        memory, lanes, count = self._memory, self._lanes, self._count
        row_bytes, stride = self._largest.row_bytes, self._largest.part_bytes(memory.ranks)
        inbox = self._largest.num_bytes
        others = [(memory.rank + i) % memory.ranks for i in range(1, memory.ranks)]
        out = memory.pushed(0, rows, self._largest.columns, dtype)
        #: rows of each rank's inbox that earlier pieces fill
        filled = [0] * memory.ranks
        parts = []
        for index, piece in enumerate(runs(0, rows, PIECES)):
            part = product(piece)
            parts.append(part)
            of_rank = runs(0, len(part), memory.ranks)
            own = of_rank[memory.rank]
            begin = piece.start + own.start
            total, at = out[begin : piece.start + own.stop], begin * row_bytes
            with lanes.sending():
                for rank in others:
                    place = inbox + memory.rank * stride + filled[rank] * row_bytes
                    memory.push(part[of_rank[rank]], rank, place)
                memory.signal(_parts_of(index), count)
            with lanes.adding():
                memory.wait_for(_parts_of(index), count)
                memory.add(part[own], inbox + filled[memory.rank] * row_bytes, stride, at)
                for rank in others:
                    memory.push(total, rank, at)
                memory.signal(_sums_of(index), count)
            filled = [n + run.stop - run.start for n, run in zip(filled, of_rank, strict=True)]
        return PushedPart(memory, out, count, parts)


def _parts_of(piece: int) -> int:
    """The flag that says that the parts of a piece are there."""
    return 2 * piece


def _sums_of(piece: int) -> int:
    """The flag that says that its sums are."""
    return 2 * piece + 1


class PushedPart:
    """A sum on its way: see `BranchParts`. `out [rows, columns]` is where it arrives and the next
    one after it; `parts` are pushed until then."""

    def __init__(self, memory: PushMemory, out: Tensor, count: int, parts: list[Tensor]) -> None:
        self._memory, self._count, self._parts = memory, count, parts
        self._out = out
        #: the sum where nothing overwrites it, if anybody needs it there
        self._kept: list[Tensor] = []
        self._was_read = self._is_gone = False

    def sum(self) -> Tensor:
        if not self._kept:
            self._kept.append(self._arrived().clone())
        return self._kept[0]

    def sum_add_norm(self, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        branch = self._kept[0] if self._kept else self._arrived()
        self._was_read = True
        return current_platform.kernels.fused_add_rms_norm(
            branch, residual, norm.weight, norm.eps, one_plus=norm.one_plus
        )

    def make_room(self) -> None:
        """For the next sum: keep what nobody has read yet."""
        if not self._was_read:
            self.sum()
        self._is_gone = True

    def _arrived(self) -> Tensor:
        """The sum, on the current stream, once all ranks' rows are here, and so all that was pushed
        has been read."""
        if self._is_gone:
            raise RuntimeError("a branch is read for a second time after the next one has begun")
        if self._parts:
            for piece in range(PIECES):
                self._memory.wait_for(_sums_of(piece), self._count)
            self._parts.clear()
        return self._out


class PushedPair:
    """This rank's `parts` of a product and the other one's, which arrive in `others [rows,
    columns]`: see `BranchParts`."""

    def __init__(
        self, memory: PushMemory, lanes: Lanes, others: Tensor, count: int, parts: list[Tensor]
    ) -> None:
        self._memory, self._lanes, self._count = memory, lanes, count
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
        pieces = runs(0, len(self._others), PIECES)
        for index, (piece, part) in enumerate(zip(pieces, self._parts, strict=True)):
            self._memory.wait_for(_parts_of(index), self._count)
            yield piece, part, self._others[piece]

    def _end(self) -> None:
        """What the parts take is free once they have been sent."""
        self._lanes.await_sent()
        self._parts.clear()
        self._was_read = True
