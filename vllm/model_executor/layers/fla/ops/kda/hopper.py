# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention in CUDA C++ for Hopper: `csrc/cuda/hopper/kda_*.cu`.

It takes bfloat16 activations and heads of 128; everything else goes to the Triton kernels.
"""

from __future__ import annotations

import torch

from vllm.kernels.chunks import CHUNK
from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.registry import Implementation
from vllm.kernels.triton.configs import device_configs
from vllm.model_executor.layers.fla.ops.gated_delta_rule.descriptors import describable
from vllm.model_executor.layers.fla.ops.kda.hopper_decode import hopper_decode, takes_decode
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill

HEAD_DIM = 128
#: tokens, and what helpers hand over of each and a head
CHUNK_OF_KERNEL, HANDED_BYTES = 32, 34816
STATE_DTYPES = (torch.float32, torch.bfloat16)


def takes_prefill(problem: KdaPrefill) -> bool:
    """Whether the kernel is compiled for this: bfloat16, heads of 128, aligned rows."""
    gates, (_, _, dk, dv) = problem.gates, problem.heads
    return (
        dk == dv == HEAD_DIM
        and all(x.dtype == torch.bfloat16 for x in (problem.qkv, gates.a, gates.b, problem.out))
        and gates.A_log.dtype == gates.dt_bias.dtype == torch.float32
        and problem.state.dtype in STATE_DTYPES
        and all(describable(x) for x in (problem.qkv, gates.a, problem.out, problem.state))
    )


def helpers_of(problem: KdaPrefill) -> int:
    """How many blocks of threads make factors for those that scan, where each head of a sequence
    has three multiprocessors: one for each half of it and one for them. Else none: those that scan
    make their own. Bits do not depend on it."""
    pairs = problem.heads[0] * len(problem.state_indices)
    multiprocessors = device_configs(problem.qkv.device).multiprocessors
    return multiprocessors - 2 * pairs if 3 * pairs <= multiprocessors else 0


def hopper_prefill(p: KdaPrefill) -> None:
    """See `naive.kda_prefill`; for what `takes_prefill`.

    Raises:
        RuntimeError: a problem that it does not take.
    """
    if not len(p.chunk_indices):
        return
    heads, gates, helpers = p.heads[0], p.gates, helpers_of(p)
    handed = CHUNK // CHUNK_OF_KERNEL * len(p.chunk_indices) * heads if helpers else 0
    torch.ops.vllm_cuda.kda_prefill.default(
        p.qkv.unflatten(1, (3 * heads, HEAD_DIM)),
        gates.a,
        gates.b,
        gates.A_log,
        gates.dt_bias.view(heads, HEAD_DIM),
        p.out,
        p.state,
        p.state_indices,
        p.has_initial_state,
        p.query_start_loc,
        p.chunk_offsets,
        helpers,
        p.qkv.new_empty(handed * HANDED_BYTES, dtype=torch.uint8),
        p.qkv.new_zeros(handed, dtype=torch.int32),
        HEAD_DIM**-0.5,
    )


OPS = CudaOps(
    what="Kimi delta attention",
    why="shorter on Hopper; the kernels are compiled for these alone",
    instead_of="Triton",
    chosen="vllm_cuda for bfloat16 and heads of 128, Triton for others",
)
kda_prefill = Implementation(hopper_prefill, takes_prefill, OPS)
kda_decode = Implementation(hopper_decode, takes_decode, OPS)
