# SPDX-License-Identifier: Apache-2.0
"""The reference paged attention against torch's attention over contiguous keys."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.kernels.cases import attention_case, error_ratio
from vllm.kernels.attention import AttentionProblem, QueryRows
from vllm.kernels.naive import NaiveKernels

kernels = NaiveKernels()


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 2, 24)])
def test_paged_equals_dense(heads, window):
    lengths = [(1, 1), (5, 21), (33, 33), (1, 40)]
    case = attention_case(lengths, heads, torch.float64, "cpu", window=window, padding=1)
    kernels.paged_attention(AttentionProblem(**case))
    group = heads[0] // heads[1]
    for seq, (query_len, seq_len) in enumerate(lengths):
        start = case["query_start_loc"][seq]
        blocks = case["block_table"][seq, : -(-seq_len // 16)].long()
        key, value = (
            case["kv_cache"][blocks, i].flatten(0, 1)[:seq_len].transpose(0, 1) for i in range(2)
        )
        distance = torch.arange(seq_len - query_len, seq_len)[:, None] - torch.arange(seq_len)
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        ref = scaled_dot_product_attention(
            case["query"][start : start + query_len].transpose(0, 1),
            key.repeat_interleave(group, 0),
            value.repeat_interleave(group, 0),
            attn_mask=mask,
        )
        out = case["out"][start : start + query_len].transpose(0, 1)
        assert error_ratio(out, ref) < 1e-12
    assert case["out"][-1].isnan().all(), "padding must not be written"


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("whole", [True, False])
def test_rows_of_a_block(whole, window):
    """All see from the first row's window on; to the end of the block, or to themselves."""
    rows = QueryRows.WHOLE_BLOCK if whole else QueryRows.CAUSAL_BLOCK
    case = attention_case([(5, 40)], (4, 2, 16), torch.float64, "cpu", window=window, rows=rows)
    kernels.paged_attention(AttentionProblem(**case))
    key, value = (case["kv_cache"][case["block_table"][0, :3].long(), i] for i in range(2))
    for i in range(5):
        first, last = 0 if window is None else 36 - window, 40 if whole else 36 + i
        keys, values = (
            x.flatten(0, 1)[first:last].transpose(0, 1).repeat_interleave(2, 0)
            for x in (key, value)
        )
        ref = scaled_dot_product_attention(case["query"][i][:, None], keys, values)
        assert error_ratio(case["out"][i], ref[:, 0]) < 1e-12


def test_blocks_below_the_window_are_not_read():
    """They may be another group's by now, and hold NaN."""
    case = attention_case([(4, 100), (40, 40)], (4, 2, 16), torch.float32, "cpu", window=20)
    kernels.paged_attention(AttentionProblem(**case))
    freed = case["block_table"][0, : (100 - 4 - 20) // 16]
    case["kv_cache"][freed.long()] = float("nan")
    out = torch.full_like(case["out"], float("nan"))
    kernels.paged_attention(AttentionProblem(**case | dict(out=out)))
    assert torch.equal(out, case["out"]) and not out.isnan().any()


def test_write_rows_skips_negative_slots():
    rows = torch.randn(3, 2, 4)
    cache = torch.zeros(4, 16, 2, 4)
    kernels.write_rows(rows, cache, torch.tensor([17, -1, 63]))
    assert torch.equal(cache[1, 1], rows[0]) and torch.equal(cache[3, 15], rows[2])
    assert cache.count_nonzero() == 16


def test_the_gate():
    case = attention_case([(3, 20)], (4, 2, 16), torch.float64, "cpu", gated=True)
    kernels.paged_attention(AttentionProblem(**case))
    plain = torch.empty_like(case["out"])
    kernels.paged_attention(AttentionProblem(**case | dict(out=plain, gate=None)))
    assert error_ratio(case["out"], plain / (1 + (-case["gate"]).exp())) < 1e-14
