# SPDX-License-Identifier: Apache-2.0
"""The CPU attention ops against fp64, and their bits against other ways of computing them."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import Case, arena_cache, attention_case, check, randn, rope_case, strided
from vllm.kernels.attention import AttentionProblem, QueryRows
from vllm.kernels.cpu import CpuKernels
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.rotary import RotaryProblem

KERNELS = CpuKernels()
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
DTYPES = list(TOLERANCE)


def run(case: Case, **changed: object) -> Tensor:
    case = case | changed
    case["out"] = torch.full_like(case["out"], float("nan"))
    KERNELS.paged_attention(AttentionProblem(**case))
    return case["out"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads", [(4, 2, 32), (6, 1, 12), (8, 8, 16), (8, 1, 96), (3, 3, 128), (4, 1, 256), (5, 1, 20)]
)
def test_mixed_batch_matches_fp64(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    lengths = [(1, 1), (1, 40), (17, 17), (5, 133), (1, 300), (130, 150)]
    check(
        KERNELS,
        "paged_attention",
        attention_case(lengths, heads, dtype, "cpu", padding=2),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_follows_as_an_op_of_its_own(dtype: torch.dtype) -> None:
    case = attention_case([(1, 40), (5, 33)], (4, 2, 32), dtype, "cpu", gated=True)
    expected = KERNELS.mul_sigmoid(run(case, gate=None), case["gate"])
    assert torch.equal(run(case).flatten(1), expected)
    check(KERNELS, "paged_attention", case, TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 16, 100, 128, 129, 1000])
def test_sliding_window_matches_fp64(window: int) -> None:
    case = attention_case(
        [(1, 400), (300, 300), (40, 270)], (4, 2, 32), torch.float32, "cpu", window=window
    )
    check(KERNELS, "paged_attention", case, TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [None, 1, 20, 140])
@pytest.mark.parametrize("rows", [QueryRows.CAUSAL_BLOCK, QueryRows.WHOLE_BLOCK])
def test_rows_of_a_block_match_fp64(rows: QueryRows, window: int | None) -> None:
    """Also of a block that several work items share."""
    lengths, heads = [(16, 130), (3, 40), (1, 1), (70, 333)], (12, 2, 32)
    case = attention_case(lengths, heads, torch.float32, "cpu", padding=1, window=window, rows=rows)
    check(KERNELS, "paged_attention", case, TOLERANCE[torch.float32])


@pytest.mark.parametrize("block_size", [1, 7, 128, 256])
def test_any_block_size(block_size: int) -> None:
    case = attention_case(
        [(1, 300), (20, 260)], (4, 2, 16), torch.float32, "cpu", block_size=block_size
    )
    check(KERNELS, "paged_attention", case, TOLERANCE[torch.float32])


def test_blocks_below_the_window_are_not_read() -> None:
    case = attention_case([(4, 400)], (4, 2, 32), torch.float32, "cpu", window=64)
    expected = run(case)
    freed = case["block_table"][0, : (400 - 4 - 64) // 16]
    case["kv_cache"][freed.long()] = float("nan")
    assert torch.equal(run(case), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 32), (8, 1, 20), (12, 2, 128)])
@pytest.mark.parametrize("window", [None, 70])
def test_prefill_chunks_and_decode_have_the_same_bits(
    dtype: torch.dtype, heads: tuple[int, int, int], window: int | None
) -> None:
    whole = attention_case([(200, 200)], heads, dtype, "cpu", window=window)
    expected = run(whole)
    cuts = [0, 1, 2, 17, 80, 81, 144, 199, 200]
    for begin, end in pairwise(cuts):
        part = run(
            whole,
            query=whole["query"][begin:end],
            out=whole["out"][begin:end],
            seq_lens=torch.tensor([end], dtype=torch.int32),
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
        )
        assert torch.equal(part, expected[begin:end]), (begin, end)


def test_neighbours_do_not_change_bits() -> None:
    case = attention_case([(1, 300), (60, 60), (1, 9)], (4, 2, 64), torch.float32, "cpu")
    expected = run(case)
    starts = case["query_start_loc"].tolist()
    for seq in range(3):
        rows = slice(starts[seq], starts[seq + 1])
        alone = run(
            case,
            query=case["query"][rows],
            out=case["out"][rows],
            block_table=case["block_table"][seq : seq + 1],
            seq_lens=case["seq_lens"][seq : seq + 1],
            query_start_loc=torch.tensor([0, starts[seq + 1] - starts[seq]], dtype=torch.int32),
        )
        assert torch.equal(alone, expected[rows])


def test_nan_in_one_sequence_stays_there() -> None:
    case = attention_case([(3, 40), (3, 40)], (4, 2, 32), torch.float32, "cpu")
    clean = run(case)
    case["kv_cache"][case["block_table"][0, 0], 0, 0] = float("nan")
    out = run(case)
    assert out[:3].isnan().all()
    assert torch.equal(out[3:], clean[3:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("heads, rot", [((4, 2, 32), 8), ((3, 1, 12), 12), ((8, 4, 96), 48)])
def test_qk_norm_rope_cache_matches_fp64(
    dtype: torch.dtype, gated: bool, one_plus: bool, heads: tuple[int, int, int], rot: int
) -> None:
    case = rope_case(37, heads, dtype, "cpu", gated=gated, one_plus=one_plus, rot=rot)
    check(Rows(KERNELS), "qk_norm_rope_cache", case, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("one_plus", [False, True])
def test_qk_norm_rope_cache_rounds_like_the_reference(one_plus: bool) -> None:
    case = rope_case(60, (4, 2, 64), torch.bfloat16, "cpu", one_plus=one_plus)
    other = {k: v.clone() if isinstance(v, Tensor) else v for k, v in case.items()}
    out = KERNELS.qk_norm_rope_cache(RotaryProblem(**case))[:-1]
    expected = NaiveKernels().qk_norm_rope_cache(RotaryProblem(**other))[:-1]
    assert (out != expected).float().mean() < 2e-3
    keys = (x["kv_cache"].nan_to_num() for x in (case, other))
    assert torch.ne(*keys).float().mean() < 2e-3


def test_qk_norm_rope_cache_without_norms() -> None:
    case = rope_case(37, (4, 2, 32), torch.float32, "cpu", normed=False)
    check(Rows(KERNELS), "qk_norm_rope_cache", case, TOLERANCE[torch.float32])


class Rows:
    """Drops nothing but the padding row's query, which is unspecified."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels

    def qk_norm_rope_cache(self, p: RotaryProblem) -> Tensor:
        out = self.kernels.qk_norm_rope_cache(p)
        copy = {k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(p).items()}
        out[-1] = NaiveKernels().qk_norm_rope_cache(RotaryProblem(**copy))[-1]
        return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_cache_copies_bits(dtype: torch.dtype) -> None:
    key, value = (strided(randn(20, 2, 12, dtype=dtype, device="cpu")) for _ in range(2))
    cache = arena_cache(4, 2, 8, 2, 12, dtype=dtype, device="cpu")
    slots = torch.randperm(32)[:20]
    slots[3] = -1
    KERNELS.write_kv_cache(key, value, cache, slots)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(cache[slot // 8, 0, slot % 8], key[t])
            assert torch.equal(cache[slot // 8, 1, slot % 8], value[t])
    assert cache.isnan().any(-1).any(-1).sum() == 2 * (32 - 19)


@pytest.mark.parametrize("columns, extra", [(1, 0), (3, 0), (3, 8)])
def test_write_rows_copies_bits(columns: int, extra: int) -> None:
    rows = strided(torch.randn(300, columns, 40), extra) if extra else torch.randn(300, columns, 40)
    cache = arena_cache(40, 8, columns, 40, dtype=torch.float32, device="cpu")
    slots = torch.randperm(320)[:300]
    slots[[0, 299]] = -1
    KERNELS.write_rows(rows, cache, slots)
    kept = slots[1:-1]
    assert torch.equal(cache[kept // 8, kept % 8], rows[1:-1])
    assert cache.isnan().all(-1).all(-1).sum() == 320 - 298


def test_wrong_arguments_are_named() -> None:
    case = attention_case([(1, 5)], (4, 2, 16), torch.float32, "cpu")
    wrong = {
        "seq_lens must be int32": dict(seq_lens=case["seq_lens"].long()),
        "kv_cache must have the activations' dtype": dict(kv_cache=case["kv_cache"].bfloat16()),
        "kv_cache must be dense": dict(kv_cache=case["kv_cache"].transpose(2, 3)),
        "query must have shape": dict(query=case["query"][..., :8]),
        "sliding_window must be positive": dict(sliding_window=0),
        "rows must be 0, 1 or 2": dict(rows=3),
    }
    for message, changed in wrong.items():
        with pytest.raises(RuntimeError, match=f"paged_attention: {message}"):
            run(case, **changed)
