# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention in CUDA C++ for Hopper: `csrc/cuda/hopper/kda_*.cu`.

It takes bfloat16 activations and heads of 128; everything else goes to the Triton kernels, whose
inputs and outputs are the same.
"""

from __future__ import annotations

import torch

from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.registry import Implementation
from vllm.model_executor.layers.fla.ops.gated_delta_rule.descriptors import describable
from vllm.model_executor.layers.fla.ops.kda.chunk import run_chunked
from vllm.model_executor.layers.fla.ops.kda.chunk_factors import ChunkFactors, empty_factors
from vllm.model_executor.layers.fla.ops.kda.hopper_decode import hopper_decode, takes_decode
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill

HEAD_DIM = 128
STATE_DTYPES = (torch.float32, torch.bfloat16)


def takes_prefill(problem: KdaPrefill) -> bool:
    """Whether the stages are compiled for this: bfloat16, heads of 128, aligned rows."""
    gates, (_, _, dk, dv) = problem.gates, problem.heads
    return (
        dk == dv == HEAD_DIM
        and all(x.dtype == torch.bfloat16 for x in (problem.qkv, gates.a, gates.b, problem.out))
        and gates.A_log.dtype == gates.dt_bias.dtype == torch.float32
        and problem.state.dtype in STATE_DTYPES
        and all(describable(x) for x in (problem.qkv, gates.a, problem.out, problem.state))
    )


def hopper_factors(p: KdaPrefill) -> ChunkFactors:
    """As `chunk_factors`, for what `takes_prefill`.

    Raises:
        RuntimeError: a problem that it does not take.
    """
    heads, gates, made = p.heads[0], p.gates, empty_factors(p)
    q, k, _ = _split(p)
    torch.ops.vllm_cuda.kda_factors.default(
        q,
        k,
        gates.a,
        gates.b,
        gates.A_log,
        gates.dt_bias.view(heads, HEAD_DIM),
        p.query_start_loc,
        p.chunk_indices,
        HEAD_DIM**-0.5,
        made.queries,
        made.keys,
        made.ends,
        made.T,
        made.P,
        made.decays,
    )
    return made


def hopper_scan(p: KdaPrefill, factors: ChunkFactors) -> None:
    """As `scan_chunks`, for what `takes_prefill`.

    Raises:
        RuntimeError: a problem that it does not take.
    """
    torch.ops.vllm_cuda.kda_scan.default(
        _split(p)[2],
        factors.queries,
        factors.keys,
        factors.ends,
        factors.T,
        factors.P,
        factors.decays,
        p.out,
        p.state,
        p.state_indices,
        p.has_initial_state,
        p.query_start_loc,
        p.chunk_offsets,
    )


def _split(p: KdaPrefill) -> tuple[torch.Tensor, ...]:
    """q, k and v, `[tokens, heads, 128]` each."""
    return p.qkv.unflatten(1, (3 * p.heads[0], HEAD_DIM)).split(p.heads[0], dim=1)


def hopper_prefill(problem: KdaPrefill) -> None:
    """See `naive.kda_prefill`."""
    run_chunked(problem, make_factors=hopper_factors, scan=hopper_scan)


OPS = CudaOps(
    what="Kimi delta attention",
    why="shorter on Hopper; the kernels are compiled for these alone",
    instead_of="Triton",
    chosen="vllm_cuda for bfloat16 and heads of 128, Triton for others",
)
kda_prefill = Implementation(hopper_prefill, takes_prefill, OPS)
kda_decode = Implementation(hopper_decode, takes_decode, OPS)
