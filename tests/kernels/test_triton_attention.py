# SPDX-License-Identifier: Apache-2.0
"""Triton paged attention against the fp64 reference: decode, verify, prefill, windows, padding."""

import pytest
import torch

from tests.kernels.cases import TOLERANCE, attention_case, check, over_dtypes
from vllm.kernels.attention import AttentionProblem, QueryRows, triton_decode
from vllm.kernels.attention.triton_decode import (
    SHARED_NUMBERS,
    SPLIT_KEYS,
    TURN_KEYS,
    TURN_SPLITS,
    arrivals,
    decode_tile,
    idle_part,
    num_splits,
    shares_of,
)
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.triton.configs import pick, shipped
from vllm.utils.math_utils import cdiv

pytestmark = pytest.mark.slow

kernels = CudaKernels()
DECODE = [(1, 1), (1, 16), (1, 17), (1, 300)]
VERIFY = [(4, 4), (1, 90), (3, 65), (4, 130)]
PREFILL = [(1, 50), (70, 70), (33, 100), (2, 3), (65, 65)]


@pytest.mark.parametrize(
    ("lengths", "heads", "dtype"),
    over_dtypes([DECODE, VERIFY, PREFILL], [(2, 2, 12), (4, 1, 32), (6, 2, 80), (4, 2, 256)]),
    indirect=["dtype"],
)
def test_against_reference(lengths, heads, dtype, device):
    case = attention_case(lengths, heads, dtype, device, padding=2)
    check(kernels, "paged_attention", case, TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("lengths", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])
def test_sliding_window(lengths, window, device):
    case = attention_case(lengths, (4, 2, 16), torch.float32, device, window=window)
    check(kernels, "paged_attention", case, TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("rows", [QueryRows.CAUSAL_BLOCK, QueryRows.WHOLE_BLOCK])
@pytest.mark.parametrize("lengths", [VERIFY, PREFILL], ids=["short", "tiles"])
def test_rows_of_a_block(lengths, rows, window, device):
    case = attention_case(
        lengths, (4, 2, 16), torch.float32, device, padding=1, window=window, rows=rows
    )
    check(kernels, "paged_attention", case, TOLERANCE[torch.float32])


@pytest.mark.parametrize("lengths", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])
def test_blocks_below_the_window_are_not_read(lengths, device):
    """They may be another group's by now, and hold NaN."""
    window = 20
    case = attention_case(lengths, (4, 2, 16), torch.float32, device, window=window)
    kernels.paged_attention(AttentionProblem(**case))
    for seq, (query_len, seq_len) in enumerate(lengths):
        freed = case["block_table"][seq, : max(0, seq_len - query_len - window + 1) // 16]
        case["kv_cache"][freed.long()] = float("nan")
    out = torch.full_like(case["out"], float("nan"))
    kernels.paged_attention(AttentionProblem(**case | dict(out=out)))
    assert torch.equal(out, case["out"]) and not out.isnan().any()


@pytest.mark.parametrize("bound", [130, 10**6])
def test_any_bound_on_the_length_gives_the_same_result(bound, device):
    """Graph capture passes a bound; it only changes the number of splits."""
    lengths = [(1, 17), (1, 130)]
    case = attention_case(lengths, (2, 1, 16), torch.float32, device) | dict(max_seq_len=bound)
    check(kernels, "paged_attention", case, TOLERANCE[torch.float32])


def test_strided_output(device):
    case = attention_case(PREFILL, (4, 2, 16), torch.float32, device)
    wide = torch.full((*case["out"].shape[:2], 40), float("nan"), device=device)
    check(kernels, "paged_attention", case | dict(out=wide[..., :16]), TOLERANCE[torch.float32])
    assert wide[..., 16:].isnan().all()


@pytest.mark.parametrize("lengths", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])
def test_the_gate(lengths, dtype, device):
    case = attention_case(lengths, (6, 2, 80), dtype, device, padding=2, gated=True)
    check(kernels, "paged_attention", case, TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])
def test_the_gate_has_the_bits_of_a_launch_of_its_own(lengths, dtype, device):
    case = attention_case(lengths, (4, 2, 32), dtype, device, gated=True)
    kernels.paged_attention(AttentionProblem(**case))
    out = torch.empty_like(case["out"])
    kernels.paged_attention(AttentionProblem(**case | dict(out=out, gate=None)))
    assert torch.equal(kernels.mul_sigmoid(out, case["gate"]), case["out"].flatten(1))


@pytest.mark.parametrize("bound", [65, 300])
def test_shares_are_joined_once_all_are_there(bound, device):
    """Launch after launch: the count of arrivals starts from zero again, whoever was last."""
    first, second = (
        attention_case(lengths, (4, 2, 16), torch.float32, device, padding=1)
        | dict(max_seq_len=bound)
        for lengths in ([(1, 300), (1, 64), (1, 130)], [(1, 70), (1, 300), (1, 1)])
    )
    for case in (first, second, first):
        case["out"].fill_(float("nan"))
        check(kernels, "paged_attention", case, TOLERANCE[torch.float32])
    assert not arrivals(torch.device(device)).any()


def test_more_joins_than_counters_are_refused(device, monkeypatch):
    monkeypatch.setattr(triton_decode, "MAX_JOINS", 5)
    case = attention_case([(1, 300)] * 3, (4, 2, 16), torch.float32, device)
    with pytest.raises(ValueError, match="3 sequences of 2 kv heads"):
        kernels.paged_attention(AttentionProblem(**case))


def test_large_scores_stay_finite(device):
    case = attention_case(PREFILL, (4, 2, 16), torch.float32, device) | dict(scale=40.0)
    check(kernels, "paged_attention", case, 2e-5)


def test_split_counts_are_one_wave_and_stay_bounded():
    assert num_splits(1, 4, 262144, 132) == 33
    assert num_splits(64, 4, 1024, 132) == 1
    assert num_splits(8, 4, 16384, 132) == 4
    assert num_splits(512, 4, 262144, 132) == 1
    assert num_splits(1, 4, SPLIT_KEYS + 1, 132) == 2


def shares(num_seqs, heads=(32, 8, 128), length=12000, query=1, dtype=torch.bfloat16):
    query_heads, kv_heads, dim = heads
    tokens = num_seqs * query
    cache = torch.empty(8, 2, 16, kv_heads, dim, dtype=dtype, device="meta")
    rows = torch.empty(tokens, query_heads, dim, dtype=dtype, device="meta")
    lengths = torch.empty(num_seqs, dtype=torch.int32, device="meta")
    problem = AttentionProblem(
        rows, cache, lengths, lengths, lengths, query, length, 1.0, None, torch.empty_like(rows)
    )
    return shares_of(problem, shipped("NVIDIA H200"))


@pytest.mark.parametrize("num_seqs", [9, 12, 17, 24, 34, 48, 68])
def test_keys_are_split_where_the_last_turn_leaves_much_of_the_chip_idle(num_seqs):
    found = shares(num_seqs)
    assert (found.splits, found.keys) == (TURN_SPLITS, TURN_KEYS)
    assert found.tile == shipped("NVIDIA H200").attention_decode_many[128]


@pytest.mark.parametrize("num_seqs", [16, 32, 64, 128, 129, 256])
def test_keys_are_whole_where_turns_are_full_or_joins_too_many(num_seqs):
    found = shares(num_seqs)
    assert found.splits == 1
    assert found.tile == decode_tile(shipped("NVIDIA H200"), num_seqs, 8, 128)


def test_few_programs_share_the_chip_once():
    assert (shares(8).splits, shares(8).keys) == (2, SPLIT_KEYS)


def test_shares_that_take_turns_are_no_more_than_keys_and_memory_allow():
    assert shares(17, length=600).splits == cdiv(600, TURN_KEYS)
    assert shares(17, length=TURN_KEYS).splits == 1
    wide = (128, 8, 128)
    assert shares(17, heads=wide, query=16).splits == SHARED_NUMBERS // (17 * 16 * 128 * 128)
    assert shares(17, dtype=torch.float32).splits == 1


def test_idle_parts_of_turns():
    assert idle_part(66, 132) == 0.5
    assert idle_part(264, 132) == 0
    assert idle_part(272, 132) == pytest.approx(1 - 272 / 528)


def test_tiles_follow_from_the_programs_per_multiprocessor():
    configs = shipped("NVIDIA H200")
    assert decode_tile(configs, 33, 4, 256) == configs.attention_decode_few[256]
    assert decode_tile(configs, 34, 4, 256) == configs.attention_decode[256]
    assert decode_tile(configs, 66, 4, 256) == configs.attention_decode[256]
    assert decode_tile(configs, 67, 4, 256) == configs.attention_decode_many[256]


def test_head_dimension_above_the_tables_is_refused():
    with pytest.raises(ValueError, match="512"):
        pick(shipped(None).attention_prefill, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("heads", [(16, 4, 256), (32, 8, 128), (24, 4, 256)])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 4096), (1, 1), (1, 777)],
        [(1, 4096), (1, 1), (1, 777)] * 8,
        [(1, 200), (1, 1), (1, 777)] * 14,
        [(1, 200), (1, 1), (1, 777)] * 30,
        [(1000, 3000), (1, 2000), (2048, 2048)],
        [(5, 2005)] * 9,
    ],
    ids=["decode 3", "decode 24", "decode 42", "decode 90", "prefill", "verify"],
)
def test_realistic_sizes(lengths, heads, device):
    case = attention_case(lengths, heads, torch.bfloat16, device, padding=3, gated=True)
    check(kernels, "paged_attention", case, TOLERANCE[torch.bfloat16])
    out = torch.empty_like(case["out"])
    kernels.paged_attention(AttentionProblem(**case | dict(out=out, gate=None)))
    apart = kernels.mul_sigmoid(out, case["gate"])
    real = int(case["query_start_loc"][-1])
    assert torch.equal(apart[:real], case["out"].flatten(1)[:real])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.usefixtures("own_stream")
def test_whoever_comes_last_joins_to_the_same_bits(rows):
    case = attention_case([(1, 4000)] * rows, (16, 4, 256), torch.bfloat16, "cuda", gated=True)
    kernels.paged_attention(AttentionProblem(**case))
    expected = case["out"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(10):
            case["out"].fill_(float("nan"))
            kernels.paged_attention(AttentionProblem(**case))
    for _ in range(200):
        graph.replay()
        assert torch.equal(case["out"], expected)
    assert not arrivals(case["out"].device).any()
