# SPDX-License-Identifier: Apache-2.0
"""Who may read and write which block, and what the block tables must say: host side of the
sanitizer, all in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: writers that are no request
NOBODY = 0
CHECKPOINT = -1


@dataclass(frozen=True)
class BadUse:
    """Request `request` (its place in the arrays asked about) misuses its `index`-th block."""

    request: int
    index: int
    block_id: int
    problem: str


@dataclass(frozen=True)
class BlockRange:
    """Blocks of the requests in `rows` that a step reads, `[first, end)`, and writes, from
    `first_written` on; all arrays `[num_reqs]`. `serials`: the requests as writers."""

    rows: np.ndarray
    serials: np.ndarray
    first: np.ndarray
    first_written: np.ndarray
    end: np.ndarray

    @property
    def read(self) -> np.ndarray:
        """`[num_reqs, widest]` bool."""
        index = np.arange(int(self.end.max(initial=0)))
        return np.asarray((index >= self.first[:, None]) & (index < self.end[:, None]))


class GroupTags:
    """Generation, use and writer of every block of one group, and every row's block list.

    `tags[row, i]`: generation of block `ids[row, i]` when the request got it. A block has one
    writer: the request that got it empty. `num_null`: ids below it lie in the null page.
    """

    def __init__(self, num_blocks: int, num_null: int, max_rows: int, max_blocks: int) -> None:
        self.num_null = num_null
        self.generation = np.zeros(num_blocks, dtype=np.int32)
        self.in_use = np.zeros(num_blocks, dtype=bool)
        self.writer = np.zeros(num_blocks, dtype=np.int32)
        self.ids = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self.tags = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self.count = np.zeros(max_rows, dtype=np.int32)

    # ---- what the scheduler did ----------------------------------------------------------------

    def taken(self, block_ids: np.ndarray, generations: np.ndarray) -> str | None:
        """Blocks are free no longer; what is wrong, if anything."""
        if self.in_use[block_ids].any() or (self.generation[block_ids] + 1 != generations).any():
            return "was taken although it is not free"
        self.generation[block_ids] = generations
        self.in_use[block_ids] = True
        self.writer[block_ids] = NOBODY
        return None

    def freed(self, block_ids: np.ndarray) -> None:
        self.in_use[block_ids] = False

    def attach(
        self, row: int, start: int, block_ids: np.ndarray, first_own: int, serial: int
    ) -> tuple[int, int] | None:
        """Blocks from `start` on of a row; those from `first_own` on are the request's to write.

        Returns `(index, writer)` of a block that has a writer already.
        """
        end = start + len(block_ids)
        self.ids[row, start:end] = block_ids
        self.tags[row, start:end] = self.generation[block_ids]
        self.count[row] = end
        first = max(first_own, start)
        own = block_ids[first - start :]
        writers = self.writer[own]
        taken = (own >= self.num_null) & (writers != NOBODY) & (writers != serial)
        if taken.any():
            index = int(taken.argmax())
            return first + index, int(writers[index])
        self.writer[own[own >= self.num_null]] = serial
        return None

    # ---- what a step is about to do ------------------------------------------------------------

    def misuse(self, used: BlockRange, uploaded: np.ndarray) -> BadUse | None:
        """The first block a step must not use as it will; `uploaded [num_reqs, any]`: the table
        that the kernels see."""
        read = used.read
        width = read.shape[1]
        ids, tags = self.ids[used.rows, :width], self.tags[used.rows, :width]
        index = np.arange(width)
        if uploaded.shape[1] < width:
            uploaded = np.pad(uploaded, ((0, 0), (0, width - uploaded.shape[1])))
        written = read & (index >= used.first_written[:, None])
        rules = (
            (index >= self.count[used.rows][:, None], "the request was given no such block"),
            (uploaded[:, :width] != ids, "the block table of the step names another block"),
            (ids < self.num_null, "is the null block, where nothing is kept"),
            (~self.in_use[ids], "was freed since the request got it"),
            (self.generation[ids] != tags, "was freed and given away since the request got it"),
            (
                written & (self.writer[ids] != used.serials[:, None]),
                "is shared or another's, and would be written to",
            ),
        )
        for broken, problem in rules:
            broken = broken & read
            if broken.any():
                request, at = (int(x) for x in np.argwhere(broken)[0])
                block_id = int(ids[request, at])
                if problem.startswith("the block table"):
                    problem += f" ({int(uploaded[request, at])})"
                return BadUse(request, at, block_id, problem)
        return None

    def slots(self, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
        """Where tokens `rows, positions [tokens]` belong, `[tokens]` int64."""
        blocks = self.ids[rows, positions // block_size].astype(np.int64)
        return np.asarray(blocks * block_size + positions % block_size)
