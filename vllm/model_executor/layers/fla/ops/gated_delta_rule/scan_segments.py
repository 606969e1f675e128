# SPDX-License-Identifier: Apache-2.0
"""Where the scans of long sequences are cut, decided from host integers alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from vllm.kernels.chunks import CHUNK
from vllm.utils.math_utils import cdiv

#: columns of the state that one program carries through a sequence
COLUMNS = 64
#: share of the multiprocessors that a plain scan may keep busy, on average, and yet be cut
MOST_BUSY = 0.25
#: tokens of the longest sequence from which cutting gains
WORTH_CUTTING = 3072
#: chunks of the shortest segment
SHORTEST = 8


@dataclass(frozen=True)
class ScanSegments:
    """The sequences of a batch in pieces, in order; each sequence has one piece or more, all of
    whole chunks but for its last.

    int32 on the device: `starts [segments + 1]` (tokens) and `chunk_offsets [segments + 1]` as a
    batch of so many sequences would have them, `owners [segments]` (sequence of each segment),
    `firsts [sequences + 1]` (first segment of each sequence) and `indices [segments]`, a state for
    each in a pool of so many; `carried [segments]` bool: all true.
    """

    starts: Tensor
    chunk_offsets: Tensor
    owners: Tensor
    firsts: Tensor
    indices: Tensor
    carried: Tensor

    def __len__(self) -> int:
        return len(self.owners)


@dataclass(frozen=True)
class ScanCuts:
    """Where a device with so many multiprocessors cuts the scans of so many value heads."""

    heads: int
    head_v_dim: int
    multiprocessors: int

    def of_batch(self, query_start_loc: Sequence[int], device: torch.device) -> ScanSegments | None:
        """The segments of sequences that start at these tokens; None: none is worth cutting."""
        counts = self.counts([end - start for start, end in pairwise(query_start_loc)])
        return cut_segments(query_start_loc, counts, device) if max(counts, default=1) > 1 else None

    def counts(self, lengths: Sequence[int]) -> list[int]:
        """In how many segments sequences of these lengths are scanned.

        They are cut where their plain scan, one program per value head and 64 columns of the
        state, would take as long as the longest one and leave three quarters of the device idle
        meanwhile. Then there are as many segments, by length, as multiprocessors for them.
        """
        chunks = [cdiv(length, CHUNK) for length in lengths]
        total, longest = sum(chunks), max(chunks, default=0)
        programs = self.heads * cdiv(self.head_v_dim, COLUMNS)
        idle = programs * total <= MOST_BUSY * self.multiprocessors * longest
        if not idle or max(lengths, default=0) < WORTH_CUTTING:
            return [1] * len(chunks)
        room = self.multiprocessors // programs
        return [max(1, min(n * room // total, n // SHORTEST)) for n in chunks]


def cut_segments(
    query_start_loc: Sequence[int], counts: Sequence[int], device: torch.device
) -> ScanSegments:
    """Sequences that start at these tokens, in so many segments of nearly equal whole chunks.

    The copy to the device does not wait for it.
    """
    starts, offsets, owners, firsts = [0], [0], [], [0]
    for seq, count in enumerate(counts):
        first, end = query_start_loc[seq], query_start_loc[seq + 1]
        chunks, offset = cdiv(end - first, CHUNK), offsets[-1]
        ends = [chunks * (i + 1) // count for i in range(count)]
        starts += [min(first + n * CHUNK, end) for n in ends]
        offsets += [offset + n for n in ends]
        owners += [seq] * count
        firsts.append(len(owners))
    rows = [starts, offsets, owners, firsts, list(range(len(owners)))]
    # Rows start on 16 bytes: kernels are compiled for the alignment of what they are given.
    width = cdiv(len(starts), 4) * 4
    table = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return ScanSegments(
        starts=table[0, : len(starts)],
        chunk_offsets=table[1, : len(offsets)],
        owners=table[2, : len(owners)],
        firsts=table[3, : len(firsts)],
        indices=table[4, : len(owners)],
        carried=torch.ones(len(owners), dtype=torch.bool, device=device),
    )
