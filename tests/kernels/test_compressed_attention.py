# SPDX-License-Identifier: Apache-2.0
"""Compressed attention: the reference against its equations, the platform's ops against it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.cases import error_ratio
from tests.kernels.compressed_cases import (
    TOLERANCE,
    attended_by_definition,
    attention_problem,
    choose_problem,
    chosen_by_definition,
    compress_problem,
    compressed_by_definition,
    read,
    widened,
)
from vllm.kernels.compressed_attention import PagedRows, naive, triton_choose
from vllm.kernels.compressed_attention.rotation import rotate_pairs
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.naive import NaiveKernels

pytestmark = pytest.mark.slow

CPU, NAIVE, TRITON = CpuKernels(), NaiveKernels(), CudaKernels()
RATIOS = [(4, True), (128, False), (6, False)]
#: starts of sequences, and tokens of each in the step
STEPS = [([0, 3, 7, 130], 1), ([1, 5, 252], 4), ([0], 300), ([37], 260), ([254], 2)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("starts", "query_len"), STEPS)
@pytest.mark.parametrize(("ratio", "overlap"), RATIOS)
def test_entries(ratio: int, overlap: bool, starts: list[int], query_len: int) -> None:
    problem = widened(compress_problem(starts, query_len, ratio, overlap))
    expected = compressed_by_definition(problem)
    before = problem.entries.cache.clone()
    NAIVE.compress(problem)
    for (seq, entry), row in expected.items():
        made = read(problem.entries, seq, entry)
        torch.testing.assert_close(made, row, rtol=1e-10, atol=1e-12)
        made.fill_(torch.nan)
    assert torch.equal(problem.entries.cache.isnan(), before.isnan()), "something else was written"


@pytest.mark.parametrize(("starts", "query_len"), STEPS)
@pytest.mark.parametrize("topk", [5, 200])
def test_choice(topk: int, starts: list[int], query_len: int) -> None:
    problem = widened(choose_problem(starts, query_len, topk))
    NAIVE.choose_entries(problem)
    for row, expected in zip(problem.chosen.tolist(), chosen_by_definition(problem), strict=True):
        assert row == expected + [-1] * (topk - len(expected))


def test_equal_scores_go_to_the_earlier_entry() -> None:
    """With few heads ReLU makes many scores 0."""
    for kernels in (NAIVE, CPU):
        problem = choose_problem([60], 2, 6, heads=1)
        problem.head_weights.zero_()
        kernels.choose_entries(problem)
        assert problem.chosen.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize(("starts", "query_len"), STEPS)
@pytest.mark.parametrize(("ratio", "topk"), [(0, None), (4, 3), (4, 90), (128, None)])
def test_attention(ratio: int, topk: int | None, starts: list[int], query_len: int) -> None:
    problem = widened(attention_problem(starts, query_len, ratio, topk))
    NAIVE.compressed_attention(problem)
    assert error_ratio(problem.out, attended_by_definition(problem)) < 1e-12


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens, or two entries, at once."""
    monkeypatch.setattr(naive, "_PIECE", 1000)
    test_entries(6, False, [0, 3, 40], 30)
    test_choice(5, [37], 40)
    test_attention(4, 9, [0, 3, 40], 30)


def test_padding_reads_and_writes_nothing() -> None:
    """Sequences without blocks, whose positions are 0, and a token that is not stored."""
    for kernels in (NAIVE, CPU):
        compress = compress_problem([7, -1, 3, -1], 1, 4, True)
        expected = compressed_by_definition(replace(compress, positions=torch.tensor([7, 0, 3, 0])))
        kernels.compress(compress)
        for seq, entry in ((0, 1), (2, 0)):
            row = read(compress.entries, seq, entry)
            torch.testing.assert_close(row.double(), expected[seq, entry], rtol=1e-4, atol=1e-5)
            row.fill_(torch.nan)
        assert compress.entries.cache.isnan().all()
        compress = replace(compress, slot_mapping=torch.full((4,), -1))
        kernels.compress(compress)
        assert compress.entries.cache.isnan().all()

        choose = choose_problem([7, -1], 1, 3)
        kernels.choose_entries(choose)
        assert choose.chosen[0].sort().values.tolist() == [-1, 0, 1]
        attention = attention_problem([40, -1], 2, 4, 3)
        kernels.compressed_attention(attention)
        assert not attention.out[:2].isnan().any()


def test_tokens_past_the_models_length_complete_nothing() -> None:
    """Their positions are 0 and they are not stored: of a decode of several tokens the last."""
    for kernels in (NAIVE, CPU):
        problem = compress_problem([5], 4, 4, True)
        positions, slots = problem.positions.clone(), problem.slot_mapping.clone()
        positions[2:], slots[2:] = 0, -1
        kernels.compress(replace(problem, positions=positions, slot_mapping=slots))
        assert problem.entries.cache.isnan().all()
        kernels.compress(problem)
        assert not read(problem.entries, 0, 1).isnan().any()


def test_the_null_block_is_nobodys() -> None:
    """Drafts that do not count may have a block in one cache and none in another."""
    for kernels in (NAIVE, CPU):
        problem = compress_problem([7], 1, 4, True)
        nobody = PagedRows(problem.entries.cache, torch.zeros_like(problem.entries.block_table))
        kernels.compress(replace(problem, entries=nobody))
        assert problem.entries.cache.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("starts", "query_len"), STEPS)
def test_cpu(dtype: torch.dtype, starts: list[int], query_len: int) -> None:
    tolerance = TOLERANCE[dtype]
    for ratio, overlap in RATIOS:
        compress = compress_problem(starts, query_len, ratio, overlap, dtype=dtype)
        wide = widened(compress)
        CPU.compress(compress)
        NAIVE.compress(wide)
        made, expected = compress.entries.cache, wide.entries.cache
        assert torch.equal(made.isnan(), expected.isnan())
        if not expected.isnan().all():
            assert error_ratio(made, expected) < tolerance
    choose = choose_problem(starts, query_len, 6, dtype=dtype)
    wide = widened(choose)
    CPU.choose_entries(choose)
    NAIVE.choose_entries(wide)
    assert torch.equal(choose.chosen, wide.chosen)
    for ratio, topk in ((0, None), (4, 6), (128, None)):
        attention = attention_problem(starts, query_len, ratio, topk, dtype=dtype)
        wide = widened(attention)
        CPU.compressed_attention(attention)
        NAIVE.compressed_attention(wide)
        assert error_ratio(attention.out, wide.out) < tolerance


@pytest.mark.parametrize(("starts", "query_len"), STEPS[:2] + [([0], 70), ([37], 100)])
@pytest.mark.parametrize(("ratio", "overlap"), RATIOS)
def test_triton_entries(
    ratio: int, overlap: bool, starts: list[int], query_len: int, dtype: torch.dtype, device: str
) -> None:
    problem = compress_problem([*starts, -1], query_len, ratio, overlap, dtype=dtype, device=device)
    wide = widened(problem)
    TRITON.compress(problem)
    NAIVE.compress(wide)
    made, expected = problem.entries.cache, wide.entries.cache
    assert torch.equal(made.isnan(), expected.isnan())
    if not expected.isnan().all():
        assert error_ratio(made, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("starts", "query_len"), STEPS[:2] + [([0], 70), ([300], 1)])
@pytest.mark.parametrize("topk", [5, 200])
def test_triton_choice(
    topk: int,
    starts: list[int],
    query_len: int,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few tokens at once, too."""
    problem = choose_problem(starts, query_len, topk, dtype=dtype, device=device)
    wide = widened(problem)
    NAIVE.choose_entries(wide)
    for piece in (1 << 24, 300):
        monkeypatch.setattr(triton_choose, "_PIECE", piece)
        problem.chosen.fill_(-7)
        TRITON.choose_entries(problem)
        assert torch.equal(problem.chosen, wide.chosen)


def test_triton_equal_scores_go_to_the_earlier_entry(device: str) -> None:
    """Scores of 0, -0 and below."""
    problem = choose_problem([60], 2, 6, heads=1, device=device)
    problem.head_weights[0], problem.head_weights[1] = 0, -1
    wide = widened(problem)
    TRITON.choose_entries(problem)
    NAIVE.choose_entries(wide)
    assert torch.equal(problem.chosen, wide.chosen)
    assert problem.chosen[0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("starts", "query_len"), STEPS[:2] + [([0], 40), ([300], 1)])
@pytest.mark.parametrize(("ratio", "topk"), [(0, None), (4, 3), (4, 90), (128, None)])
def test_triton_attention(
    ratio: int,
    topk: int | None,
    starts: list[int],
    query_len: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    problem = attention_problem(
        [*starts, -1], query_len, ratio, topk, heads=18, dtype=dtype, device=device
    )
    wide = widened(problem)
    TRITON.compressed_attention(problem)
    NAIVE.compressed_attention(wide)
    real = len(starts) * query_len
    assert error_ratio(problem.out[:real], wide.out[:real]) < TOLERANCE[dtype]


def test_rotation() -> None:
    """Neighbours are pairs, only the last dimensions turn, and the inverse turns back."""
    x = torch.randn(5, 3, 10, dtype=torch.float64)
    angles = torch.randn(5, 2, dtype=torch.float64)
    out = rotate_pairs(x, torch.cat([angles.cos(), angles.sin()], dim=-1))
    as_complex = torch.view_as_complex(x[..., 6:].reshape(5, 3, 2, 2))
    turned = as_complex * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(out[..., 6:], torch.view_as_real(turned).flatten(-2))
    assert torch.equal(out[..., :6], x[..., :6])
    back = rotate_pairs(out, torch.cat([angles.cos(), angles.sin()], dim=-1), inverse=True)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 64])
def test_cpu_bits_do_not_depend_on_the_cut_or_the_batch(size: int, dtype: torch.dtype) -> None:
    """A prompt at once, or in pieces."""
    total = 192
    compress = compress_problem([0], total, 4, True, dtype=dtype)
    choose = choose_problem([0], total, 6, dtype=dtype)
    attend = attention_problem([0], total, 4, 6, dtype=dtype)
    pieces = [slice(start, start + size) for start in range(0, total, size)]
    entries = replace(compress.entries, cache=compress.entries.cache.clone())
    CPU.compress(compress)
    for piece in pieces:
        CPU.compress(
            replace(
                compress,
                entries=entries,
                positions=compress.positions[piece],
                slot_mapping=compress.slot_mapping[piece],
            )
        )
    assert torch.equal(entries.cache.nan_to_num(), compress.entries.cache.nan_to_num())
    CPU.choose_entries(choose)
    CPU.compressed_attention(attend)
    for piece in pieces:
        part = replace(
            choose,
            query=choose.query[piece],
            head_weights=choose.head_weights[piece],
            positions=choose.positions[piece],
            chosen=torch.empty_like(choose.chosen[piece]),
        )
        CPU.choose_entries(part)
        assert torch.equal(part.chosen, choose.chosen[piece])
        assert attend.chosen is not None
        half = replace(
            attend,
            query=attend.query[piece],
            positions=attend.positions[piece],
            chosen=attend.chosen[piece],
            out=torch.empty_like(attend.out[piece]),
        )
        CPU.compressed_attention(half)
        assert torch.equal(half.out, attend.out[piece])


def test_cpu_refuses_what_it_cannot_read() -> None:
    choose = choose_problem([7], 1, 3)
    with pytest.raises(RuntimeError, match="choose_entries: head_weights must"):
        CPU.choose_entries(replace(choose, head_weights=choose.head_weights.double()))
    attend = attention_problem([7], 1, 4)
    with pytest.raises(RuntimeError, match="compressed_attention: out must"):
        CPU.compressed_attention(replace(attend, out=attend.out[:0]))
    compress = compress_problem([7], 1, 4, True)
    with pytest.raises(RuntimeError, match="compress: tokens must have values and scores"):
        CPU.compress(replace(compress, overlap=False))
    with pytest.raises(RuntimeError, match="positions must have equally many tokens"):
        CPU.compress(replace(compress_problem([7, 9], 1, 4, True), positions=torch.tensor([7])))
    with pytest.raises(RuntimeError, match="compressed_attention: sinks must be float32, got"):
        CPU.compressed_attention(replace(attend, sinks=attend.sinks.half()))
    with pytest.raises(RuntimeError, match="compress: cos_sin must have an even last dimension"):
        CPU.compress(replace(compress, cos_sin=compress.cos_sin[:, :3]))
