# SPDX-License-Identifier: Apache-2.0
"""The scan of the chunked gated delta rule in CUDA C++: `csrc/cuda/hopper/gdn_scan.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.model_executor.layers.fla.ops.gated_delta_rule.descriptors import describable
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem

HEAD_DIM = 128
STATE_DTYPES = (torch.float32, torch.bfloat16)


def takes_scan(p: ChunkedProblem, out: Tensor) -> bool:
    """Whether `scan` stands for `inter_chunk` here: bfloat16, heads of 128, aligned rows."""
    return (
        p.v.dtype == torch.bfloat16
        and p.head_k_dim == p.head_v_dim == HEAD_DIM
        and p.ssm_state.dtype in STATE_DTYPES
        and all(describable(x) for x in (p.q, p.k, p.v, out, p.ssm_state))
    )


def scan(p: ChunkedProblem, factors: ChunkFactors, out: Tensor) -> None:
    """As `inter_chunk`, for what `takes_scan`.

    Raises:
        RuntimeError: a problem that it does not take.
    """
    torch.ops.vllm_cuda.gdn_scan.default(
        p.q,
        p.k,
        p.v,
        factors.T,
        factors.P,
        factors.rows,
        out,
        p.ssm_state,
        p.state_indices,
        p.has_initial_state,
        p.query_start_loc,
        p.chunk_offsets,
    )
