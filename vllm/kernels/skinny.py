# SPDX-License-Identifier: Apache-2.0
"""Matmuls of few tokens on Hopper: `csrc/cuda/skinny.cu` where it beats cuBLAS.

At 1 to 16 tokens a matmul is bound by reading its weight once. The kernel's bits for a row follow
from that row, the weight and its bias alone: they do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm import decisions
from vllm._extension import CUDA_LIBRARY, load_cuda_ops
from vllm.kernels.skinny_launch import skinny_launch

MAX_TOKENS = 16
#: columns of the weight must be a multiple of one step of the kernel's inner loop
COLUMN_STEP = 32
#: elements of a 16-byte access
ALIGNMENT = 8
DTYPES = (torch.bfloat16, torch.float16)
WHAT = "matmuls of 1 to 16 tokens"

SkinnyOp = Callable[[Tensor, Tensor, "Tensor | None", bool], Tensor]


@dataclass(frozen=True)
class SkinnyOps:
    """The ops `(x [tokens, k], weight [n, k], bias [n] or None, overlap) -> [tokens, ...]`.

    `overlap` lets the kernel fetch its weight while the kernels ahead of it still run, so none of
    those may write the weight.
    """

    linear: SkinnyOp
    linear_silu_and_mul: SkinnyOp


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, overlap: bool) -> Tensor:
    launch = skinny_launch(len(weight), gated=False)
    out: Tensor = torch.ops.vllm_cuda.skinny_linear.default(
        x, weight, bias, overlap, launch.variant, launch.ring_bytes, launch.ctas_per_sm
    )
    return out


def _linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None, overlap: bool) -> Tensor:
    launch = skinny_launch(len(weight), gated=True)
    out: Tensor = torch.ops.vllm_cuda.skinny_linear_silu_and_mul.default(
        x, weight, bias, overlap, launch.variant, launch.ring_bytes, launch.ctas_per_sm
    )
    return out


def find_skinny_ops(capability: tuple[int, int]) -> SkinnyOps | None:
    """The ops for a device of this compute capability, or None; the choice is recorded."""
    if capability < (9, 0):
        reason = f"the kernel needs compute capability 9.0, this GPU has {capability}"
        decisions.record(WHAT, "cuBLAS", reason, instead_of="vllm_cuda")
        return None
    if not CUDA_LIBRARY.exists():
        reason = f"{CUDA_LIBRARY} is not built: see VLLM_TARGET_DEVICE=cuda"
        decisions.record(WHAT, "cuBLAS", reason, instead_of="vllm_cuda")
        return None
    load_cuda_ops()
    decisions.record(WHAT, "vllm_cuda", "reads weights nearer to the memory's speed", "cuBLAS")
    return SkinnyOps(_linear, _linear_silu_and_mul)


def is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether the ops take `x [tokens, k]` and `weight [n, k]` of one dtype."""
    return (
        x.dim() == 2
        and 0 < x.shape[0] <= MAX_TOKENS
        and x.dtype in DTYPES
        and weight.shape[1] % COLUMN_STEP == 0
        and weight.is_contiguous()
        and weight.storage_offset() % ALIGNMENT == 0
        and x.stride(1) == 1
        and x.stride(0) % ALIGNMENT == 0
        and x.storage_offset() % ALIGNMENT == 0
    )
