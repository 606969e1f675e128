# SPDX-License-Identifier: Apache-2.0
"""Prefills of Kimi delta attention in one launch of CUDA C++ for Hopper:
`csrc/cuda/hopper/kda_prefill.cu`."""

from __future__ import annotations

import torch

from vllm.kernels.chunks import CHUNK
from vllm.kernels.triton.configs import device_configs
from vllm.model_executor.layers.fla.ops.kda.hopper_decode import HEAD_DIM
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill

#: tokens, and what helpers hand over of each and a head
CHUNK_OF_KERNEL, HANDED_BYTES = 32, 34816


def helpers_of(problem: KdaPrefill) -> int:
    """How many blocks of threads make factors for those that scan, where each head of a sequence
    has three multiprocessors: one for each half of it and one for them. Else none: those that scan
    make their own. Bits do not depend on it."""
    pairs = problem.heads[0] * len(problem.state_indices)
    multiprocessors = device_configs(problem.qkv.device).multiprocessors
    return multiprocessors - 2 * pairs if 3 * pairs <= multiprocessors else 0


def prefill_at_once(p: KdaPrefill) -> None:
    """See `naive.kda_prefill`; for what `hopper.takes_prefill`.

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
