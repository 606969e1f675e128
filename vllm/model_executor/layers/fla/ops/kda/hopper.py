# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention in CUDA C++ for Hopper: `csrc/cuda/hopper/kda_*.cu`.

It takes bfloat16 activations and heads of 128; everything else goes to the Triton kernels.
"""

from __future__ import annotations

import torch

from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.registry import Implementation
from vllm.model_executor.layers.fla.ops.gated_delta_rule.descriptors import describable
from vllm.model_executor.layers.fla.ops.kda.hopper_decode import (
    HEAD_DIM,
    hopper_decode,
    takes_decode,
)
from vllm.model_executor.layers.fla.ops.kda.hopper_fused import prefill_at_once
from vllm.model_executor.layers.fla.ops.kda.hopper_stages import prefill_in_stages
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill

STATE_DTYPES = (torch.float32, torch.bfloat16)
#: Layers of so many heads are one launch. Two make the factors of fewer on all multiprocessors,
#: whatever the number of sequences. Bits differ, so a layer's heads decide, not the batch.
HEADS_OF_ONE_LAUNCH = 32


def takes_prefill(problem: KdaPrefill) -> bool:
    """Whether the kernels are compiled for this: bfloat16, heads of 128, aligned rows."""
    gates, (_, _, dk, dv) = problem.gates, problem.heads
    return (
        dk == dv == HEAD_DIM
        and all(x.dtype == torch.bfloat16 for x in (problem.qkv, gates.a, gates.b, problem.out))
        and gates.A_log.dtype == gates.dt_bias.dtype == torch.float32
        and problem.state.dtype in STATE_DTYPES
        and all(describable(x) for x in (problem.qkv, gates.a, problem.out, problem.state))
    )


def hopper_prefill(problem: KdaPrefill) -> None:
    """See `naive.kda_prefill`; for what `takes_prefill`.

    Raises:
        RuntimeError: a problem that it does not take.
    """
    at_once = problem.heads[0] >= HEADS_OF_ONE_LAUNCH
    (prefill_at_once if at_once else prefill_in_stages)(problem)


OPS = CudaOps(
    what="Kimi delta attention",
    why="shorter on Hopper; the kernels are compiled for these alone",
    instead_of="Triton",
    chosen="vllm_cuda for bfloat16 and heads of 128, Triton for others",
)
kda_prefill = Implementation(hopper_prefill, takes_prefill, OPS)
kda_decode = Implementation(hopper_decode, takes_decode, OPS)
