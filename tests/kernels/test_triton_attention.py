# SPDX-License-Identifier: Apache-2.0
"""Triton paged attention against the fp64 reference: decode, verify, prefill, windows, padding."""

import pytest
import torch

from tests.kernels.cases import TOLERANCE, attention_case, check
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.triton.configs import pick, shipped
from vllm.kernels.triton.decode_attention import SPLIT_KEYS, decode_tile, num_splits

kernels = CudaKernels()
DECODE = [(1, 1), (1, 16), (1, 17), (1, 300)]
VERIFY = [(4, 4), (1, 90), (3, 65), (4, 130)]
PREFILL = [(1, 50), (70, 70), (33, 100), (2, 3), (65, 65)]


@pytest.mark.parametrize("heads", [(2, 2, 12), (4, 1, 32), (6, 2, 80), (4, 2, 256)])
@pytest.mark.parametrize("lengths", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])
def test_against_reference(lengths, heads, dtype, device):
    case = attention_case(lengths, heads, dtype, device, padding=2)
    check(kernels, "paged_attention", case, TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("lengths", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])
def test_sliding_window(lengths, window, device):
    case = attention_case(lengths, (4, 2, 16), torch.float32, device, window=window)
    check(kernels, "paged_attention", case, TOLERANCE[torch.float32])


@pytest.mark.parametrize("lengths", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])
def test_blocks_below_the_window_are_not_read(lengths, device):
    """They may be another group's by now, and hold NaN."""
    window = 20
    case = attention_case(lengths, (4, 2, 16), torch.float32, device, window=window)
    kernels.paged_attention(**case)
    for seq, (query_len, seq_len) in enumerate(lengths):
        freed = case["block_table"][seq, : max(0, seq_len - query_len - window + 1) // 16]
        case["kv_cache"][freed.long()] = float("nan")
    out = torch.full_like(case["out"], float("nan"))
    kernels.paged_attention(**case | dict(out=out))
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


def test_large_scores_stay_finite(device):
    case = attention_case(PREFILL, (4, 2, 16), torch.float32, device) | dict(scale=40.0)
    check(kernels, "paged_attention", case, 2e-5)


def test_split_counts_are_one_wave_and_stay_bounded():
    assert num_splits(1, 4, 262144, 132) == 33
    assert num_splits(64, 4, 1024, 132) == 1
    assert num_splits(8, 4, 16384, 132) == 4
    assert num_splits(512, 4, 262144, 132) == 1
    assert num_splits(1, 4, SPLIT_KEYS + 1, 132) == 2


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
    case = attention_case(lengths, heads, torch.bfloat16, device, padding=3)
    check(kernels, "paged_attention", case, TOLERANCE[torch.bfloat16])
