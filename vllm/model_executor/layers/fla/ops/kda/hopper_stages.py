# SPDX-License-Identifier: Apache-2.0
"""Prefills of Kimi delta attention in two launches of CUDA C++ for Hopper: `kda_factors.cu` and
`kda_scan.cu` of `csrc/cuda/hopper`, whose inputs and outputs are those of the Triton kernels."""

from __future__ import annotations

import torch

from vllm.model_executor.layers.fla.ops.kda.chunk import run_chunked
from vllm.model_executor.layers.fla.ops.kda.chunk_factors import ChunkFactors, empty_factors
from vllm.model_executor.layers.fla.ops.kda.hopper_decode import HEAD_DIM
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill


def hopper_factors(p: KdaPrefill) -> ChunkFactors:
    """As `chunk_factors`, for what `hopper.takes_prefill`.

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
    """As `scan_chunks`, for what `hopper.takes_prefill`.

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


def prefill_in_stages(problem: KdaPrefill) -> None:
    """See `naive.kda_prefill`; for what `hopper.takes_prefill`."""
    run_chunked(problem, make_factors=hopper_factors, scan=hopper_scan)
