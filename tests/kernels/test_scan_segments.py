# SPDX-License-Identifier: Apache-2.0
"""Where scans are cut: host integers, no kernel."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.kernels.chunks import chunk_metadata
from vllm.model_executor.layers.fla.ops.gated_delta_rule.scan_segments import (
    SHORTEST,
    WORTH_CUTTING,
    ScanCuts,
    cut_segments,
)

CPU = torch.device("cpu")
#: a shard of eight value heads on an H200: sixteen programs per sequence
SHARD = ScanCuts(8, 128, 132)


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([8192], [8]),
        ([65536], [8]),
        ([3072], [6]),
        ([3071], [1]),
        ([8192] * 2, [4, 4]),
        ([8192] * 3, [1] * 3),
        ([8192, 40, 0, 40], [7, 1, 1, 1]),
        ([8192, 2100], [6, 1]),
        ([40] * 300, [1] * 300),
        ([], []),
        ([0, 0], [1, 1]),
    ],
)
def test_long_sequences_on_an_idle_device_are_cut(lengths: list[int], counts: list[int]) -> None:
    assert SHARD.counts(lengths) == counts


@pytest.mark.parametrize(
    ("heads", "head_v_dim", "multiprocessors", "count"),
    [(32, 128, 132, 1), (16, 128, 132, 4), (17, 128, 132, 1), (16, 192, 132, 1), (8, 128, 40, 1)],
)
def test_a_device_that_is_busy_enough_is_left_alone(
    heads: int, head_v_dim: int, multiprocessors: int, count: int
) -> None:
    assert ScanCuts(heads, head_v_dim, multiprocessors).counts([8192]) == [count]


LENGTHS = st.lists(st.integers(0, 3 * WORTH_CUTTING), max_size=5)


@given(LENGTHS, st.integers(1, 8), st.sampled_from([40, 132, 264]))
def test_segments_are_not_short_and_all_run_at_once(
    lengths: list[int], heads: int, multiprocessors: int
) -> None:
    counts = ScanCuts(heads, 128, multiprocessors).counts(lengths)
    cut = [(n, count) for n, count in zip(lengths, counts, strict=True) if count > 1]
    assert all(-(-n // 64) // count >= SHORTEST for n, count in cut)
    assert sum(count for _, count in cut) * heads * 2 <= multiprocessors


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 6)), min_size=1, max_size=5))
def test_segments_are_a_batch_of_whole_chunks(batch: list[tuple[int, int]]) -> None:
    starts = [0]
    for length, _ in batch:
        starts.append(starts[-1] + length)
    counts = [min(count, max(1, -(-length // 64))) for length, count in batch]
    made = cut_segments(starts, counts, CPU)
    pieces = made.starts.tolist()
    assert len(made) == sum(counts) == len(pieces) - 1 and made.carried.all()
    assert made.indices.tolist() == list(range(len(made)))
    assert made.chunk_offsets.tolist() == chunk_metadata(pieces)[1].tolist()
    firsts = made.firsts.tolist()
    assert [pieces[i] for i in firsts] == starts
    for seq, (first, last) in enumerate(pairwise(firsts)):
        assert made.owners[first:last].tolist() == [seq] * counts[seq]
        lengths = [end - start for start, end in pairwise(pieces[first : last + 1])]
        assert all(n and n % 64 == 0 for n in lengths[:-1])
        chunks = [-(-n // 64) for n in lengths]
        assert max(chunks) - min(chunks) <= 1


def test_every_table_starts_on_16_bytes() -> None:
    made = cut_segments([0, 700, 900], [5, 1], CPU)
    tables = (made.starts, made.chunk_offsets, made.owners, made.firsts, made.indices)
    assert all(table.data_ptr() % 16 == 0 and table.dtype == torch.int32 for table in tables)


def test_a_batch_without_cuts_has_no_segments() -> None:
    assert SHARD.of_batch([0, 2000], CPU) is None
    made = SHARD.of_batch([0, 8192, 8200], CPU)
    assert made is not None and made.firsts.tolist() == [0, 7, 8]
