# SPDX-License-Identifier: Apache-2.0
"""The list of a batch's chunks against one made sequence by sequence."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from vllm.kernels.chunks import CHUNK, chunk_metadata, fill_chunks


def plain(lengths: list[int]) -> tuple[list[list[int]], list[int]]:
    """(sequence, chunk) of every chunk and the first of each sequence."""
    pairs: list[list[int]] = []
    offsets = [0]
    for seq, length in enumerate(lengths):
        pairs += [[seq, i] for i in range((length + CHUNK - 1) // CHUNK)]
        offsets.append(len(pairs))
    return pairs, offsets


@pytest.mark.parametrize(
    "lengths",
    [[], [1], [CHUNK], [CHUNK + 1], [5, 0, 3 * CHUNK, 2 * CHUNK - 1], [0, 0], list(range(130))],
)
def test_every_chunk_of_every_sequence(lengths: list[int]) -> None:
    indices, offsets = chunk_metadata([0, *accumulate(lengths)])
    assert (indices.tolist(), offsets.tolist()) == plain(lengths)
    assert indices.shape[1:] == (2,)


def test_a_batch_need_not_start_at_zero() -> None:
    assert chunk_metadata([7, 80])[0].tolist() == [[0, 0], [0, 1]]


def test_room_is_filled_with_chunks_of_the_last_sequence() -> None:
    indices, offsets = np.full((9, 2), -7), np.full(7, -7)
    starts = np.array([0, 5, 75])
    real = fill_chunks(starts, indices, offsets, num_seqs=5, num_chunks=6)
    assert real == 3
    assert indices.tolist() == [[0, 0], [1, 0], [1, 1]] + 3 * [[4, 0]] + 3 * [[-7, -7]]
    assert offsets.tolist() == [0, 1, 3, 3, 3, 3, -7]
