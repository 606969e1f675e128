# SPDX-License-Identifier: Apache-2.0
"""The chunk factors in CUDA C++: `csrc/cuda/hopper/gdn_chunk_factors.cu` in place of
`intra_chunk`.

A chunk's bits follow from its own tokens alone.
"""

import torch
from torch import Tensor

from vllm.model_executor.layers.fla.ops.gated_delta_rule.descriptors import describable
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors, empty_factors
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem

HEAD_K_DIM = 128
GATE_DTYPES = (torch.bfloat16, torch.float32)


def takes_factors(p: ChunkedProblem) -> bool:
    """Whether `chunk_factors` computes the factors of this problem."""
    return (
        p.head_k_dim == HEAD_K_DIM
        and p.beta_scale == 1.0
        and all(x.dtype == torch.bfloat16 for x in (p.q, p.k, p.v))
        and all(_dense_heads(x) and describable(x) for x in (p.q, p.k))
        and all(x.dtype in GATE_DTYPES and x.stride(1) == 1 for x in (p.a, p.b))
        and all(x is None or _fp32_per_head(x) for x in (p.A_log, p.dt_bias))
    )


def _dense_heads(x: Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _fp32_per_head(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()


def chunk_factors(p: ChunkedProblem) -> ChunkFactors:
    """See `intra_chunk`, in one launch."""
    factors = empty_factors(p)
    torch.ops.vllm_cuda.gdn_chunk_factors.default(
        p.q,
        p.k,
        p.a,
        p.b,
        p.A_log,
        p.dt_bias,
        p.query_start_loc,
        p.chunk_indices,
        p.scale,
        p.l2norm,
        factors.T,
        factors.P,
        factors.rows,
    )
    return factors
