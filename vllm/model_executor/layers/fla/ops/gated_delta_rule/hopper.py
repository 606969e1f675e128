# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in CUDA C++ for Hopper: `csrc/cuda/hopper/gdn_*.cu`.

It takes bfloat16 activations and heads of 128; everything else goes to the Triton kernels, whose
inputs and outputs are the same.
"""

import torch
from torch import Tensor

from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.registry import Implementation
from vllm.model_executor.layers.fla.ops.gated_delta_rule.chunk import run_chunked
from vllm.model_executor.layers.fla.ops.gated_delta_rule.descriptors import describable
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper_decode import (
    hopper_decode,
    takes_decode,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.inter import inter_chunk
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import (
    ChunkFactors,
    empty_factors,
    intra_chunk,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem, GdnPrefill

HEAD_DIM = 128
STATE_DTYPES = (torch.float32, torch.bfloat16)
GATE_DTYPES = (torch.bfloat16, torch.float32)


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


def takes_factors(p: ChunkedProblem) -> bool:
    """Whether `chunk_factors` computes the factors of this problem."""
    return (
        p.head_k_dim == HEAD_DIM
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
    """See `intra_chunk`, in one launch; a chunk's bits follow from its own tokens alone."""
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


def takes_prefill(p: GdnPrefill) -> bool:
    """Whether one of the two stages is compiled for this."""
    return takes_factors(p.chunked) or takes_scan(p.chunked, p.out)


def hopper_prefill(p: GdnPrefill) -> None:
    """The chunked form, a stage in Triton where no compiled one takes the problem."""
    run_chunked(
        p.chunked,
        p.out,
        p.segments,
        make_factors=chunk_factors if takes_factors(p.chunked) else intra_chunk,
        scan=scan if takes_scan(p.chunked, p.out) else inter_chunk,
    )


OPS = CudaOps(
    what="gated delta rule",
    why="shorter on Hopper; the kernels are compiled for these alone",
    instead_of="Triton",
    chosen="vllm_cuda for bfloat16 and heads of 128, Triton for others",
)
gdn_prefill = Implementation(hopper_prefill, takes_prefill, OPS)
gdn_decode = Implementation(hopper_decode, takes_decode, OPS)
