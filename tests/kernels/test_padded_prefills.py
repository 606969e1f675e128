# SPDX-License-Identifier: Apache-2.0
"""What a graph is given of the prefills of a recurrent layer has the results of their own arrays.

Rows that are no prefill's hold NaN; sequences and chunks that are absent are there as padding.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.cases import Case, conv_case, gdn_case, run
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, PrefillBatch

DECODES = 200
UNTOUCHED = 7.0
CONFIG: Any = SimpleNamespace(
    cache_config=SimpleNamespace(splits_scans=False),
    scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=8192),
)


def _batch(case: Case, size: int) -> PrefillBatch:
    """The case's sequences behind decodes, in a step padded to `size` tokens."""
    starts = case["query_start_loc"].cpu().numpy()
    blocks = np.zeros((DECODES + len(starts) - 1, 1), dtype=np.int32)
    blocks[DECODES:, 0] = case["state_indices"].cpu()
    computed = np.ones(len(blocks), dtype=np.int64)
    computed[DECODES:] = case["has_initial_state"].cpu()
    device = case["query_start_loc"].device
    nothing = torch.zeros(0)
    common = CommonAttentionMetadata(
        num_reqs=len(blocks), num_tokens=DECODES + int(starts[-1]), num_decodes=DECODES,
        max_query_len=0, max_seq_len=0, query_start_loc=nothing, query_start_loc_cpu=starts,
        seq_lens=nothing, seq_lens_cpu=starts, num_computed_tokens_cpu=computed,
        prefill_query_start_loc=nothing, prefill_query_start_loc_cpu=starts,
        block_table=nothing[:, None], prefill_seq_lens=nothing,
        prefill_block_table=nothing[:, None], slot_mapping=nothing, block_table_cpu=blocks,
        padded_tokens=size,
    )  # fmt: skip
    builder = GDNAttentionBackend.get_builder_cls()(None, [], CONFIG, device)  # type: ignore[arg-type]
    return builder.build(common).batch


def _check(kernels: Kernels, op: str, case: Case, rows: tuple[str, ...], state: str) -> None:
    tokens = case["out"].shape[0]
    size = DECODES + tokens + 50
    batch = _batch(case, size)

    def wide(name: str) -> Tensor:
        x, other = case[name], UNTOUCHED if name == "out" else float("nan")
        filled = torch.full((size, *x.shape[1:]), other, dtype=x.dtype, device=x.device)
        filled[DECODES : DECODES + tokens] = x
        return filled

    padded = case | {name: wide(name) for name in rows} | {state: case[state].clone()}
    for name in ("state_indices", "has_initial_state", "query_start_loc"):
        padded[name] = getattr(batch, name)
    if "chunk_indices" in case:
        padded |= dict(chunk_indices=batch.chunk_indices, chunk_offsets=batch.chunk_offsets)
    run(kernels, op, case)
    run(kernels, op, padded)
    assert torch.equal(padded["out"][DECODES : DECODES + tokens], case["out"])
    assert not case["out"].isnan().any()
    assert (padded["out"][:DECODES] == UNTOUCHED).all()
    assert (padded["out"][DECODES + tokens :] == UNTOUCHED).all()
    assert torch.equal(padded[state].nan_to_num(7), case[state].nan_to_num(7))


@pytest.mark.parametrize("lengths", [[5, 70, 1], [128], [3, 64, 65]])
def test_convolution(lengths: list[int], device: str) -> None:
    case = conv_case(lengths, [True, False, True][: len(lengths)], 40, torch.float32, device)
    _check(CudaKernels(), "causal_conv1d", case, ("x", "out"), "conv_state")


@pytest.mark.parametrize("lengths", [[5, 70, 1], [128]])
def test_gated_delta_rule(lengths: list[int], device: str) -> None:
    carried = [True, False, True][: len(lengths)]
    case = gdn_case(lengths, carried, (1, 2, 32, 32), torch.float32, device)
    _check(CudaKernels(), "gdn_prefill", case, ("qkv", "a", "b", "out"), "ssm_state")


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[300], [64, 128, 5], [1, 700, 63] * 5, [17] * 16])
def test_realistic_sizes(lengths: list[int]) -> None:
    """With the kernels that serve this GPU."""
    carried = [i % 2 == 0 for i in range(len(lengths))]
    kernels: Kernels = current_platform.kernels
    case = conv_case(lengths, carried, 8192, torch.bfloat16, "cuda")
    _check(kernels, "causal_conv1d", case, ("x", "out"), "conv_state")
    case = gdn_case(lengths, carried, (16, 32, 128, 128), torch.bfloat16, "cuda")
    _check(kernels, "gdn_prefill", case, ("qkv", "a", "b", "out"), "ssm_state")
