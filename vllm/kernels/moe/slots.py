# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The weighted sum of each token's slots on GPUs, alone or with the norm that reads the stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.moe import ExpertsProblem
from vllm.kernels.norm.triton import normed_row, row_warps
from vllm.kernels.registry import Implementation
from vllm.kernels.residual_stream import Norm, ResidualStream
from vllm.kernels.triton.dependent_launch import await_previous, dependent_launch, start_next
from vllm.kernels.triton.launcher import Launcher
from vllm.utils.math_utils import cdiv, next_power_of_2

#: columns of the result that one program of the sum alone makes
_COLUMNS = 1024


@triton.jit
def _weighted_sum(
    outputs_ptr, weights_ptr, experts_ptr, shared_ptr, stride_experts, stride_shared,
    token, column, exists,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, SPREAD: tl.constexpr, SHARED: tl.constexpr,
    N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """`[1, columns]` of a token's sum in fp32, in the order of its slots, but for those whose
    expert is not here. SPREAD: many are not, so it pays to know that before fetching them."""
    slot = tl.arange(0, BLOCK_S)
    expert = tl.load(experts_ptr + token * stride_experts + slot, mask=slot < SLOTS, other=-1)
    is_here = (expert >= 0) & (expert < EXPERTS)
    here = tl.sum(is_here.to(tl.int64) << slot.to(tl.int64), 0)
    weights = weights_ptr + token * (SLOTS + SHARED)
    total = tl.zeros(column.shape, tl.float32)
    for slot in tl.static_range(SLOTS):
        added = ((here >> slot) & 1) != 0
        at = outputs_ptr + (token * SLOTS + slot) * N + column
        x = tl.load(at, mask=exists & added if SPREAD else exists, other=0.0)
        total += tl.load(weights + slot) * tl.where(added, x, 0.0).to(tl.float32)
    if SHARED:
        x = tl.load(shared_ptr + token * stride_shared + column, mask=exists, other=0.0)
        total += tl.load(weights + SLOTS) * x.to(tl.float32)
    return total


@triton.jit
def _add_slots_kernel(
    outputs_ptr, weights_ptr, experts_ptr, shared_ptr, stride_experts, stride_shared, out_ptr,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, SPREAD: tl.constexpr, SHARED: tl.constexpr,
    N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, columns)."""
    start_next(PDL)
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    exists = column < N
    total = _weighted_sum(
        outputs_ptr, weights_ptr, experts_ptr, shared_ptr, stride_experts, stride_shared,
        token, column, exists, SLOTS, EXPERTS, SPREAD, SHARED, N, BLOCK_S,
    )  # fmt: skip
    tl.store(out_ptr + token * N + column, total, mask=exists)


@triton.jit
def _add_slots_norm_kernel(
    outputs_ptr, weights_ptr, experts_ptr, shared_ptr, stride_experts, stride_shared,
    residual_ptr, stride_residual, w_ptr, eps, normed_ptr, sum_ptr,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, SPREAD: tl.constexpr, SHARED: tl.constexpr,
    N: tl.constexpr, ONE_PLUS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens); what is rounded is what `_add_slots_kernel` and the norm's own one round."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    exists = column < N
    start_next(PDL)
    w = tl.load(w_ptr + column, mask=exists, other=0.0).to(tl.float32)
    await_previous(PDL)
    residual = tl.load(residual_ptr + token * stride_residual + column, mask=exists, other=0.0)
    branch = _weighted_sum(
        outputs_ptr, weights_ptr, experts_ptr, shared_ptr, stride_experts, stride_shared,
        token, column, exists, SLOTS, EXPERTS, SPREAD, SHARED, N, BLOCK_S,
    )  # fmt: skip
    branch = branch.to(residual.dtype).to(tl.float32)
    total = (branch + residual.to(tl.float32)).to(residual.dtype)
    tl.store(sum_ptr + token * N + column, total, mask=exists)
    normed = normed_row(total, w, N, eps, ONE_PLUS)
    tl.store(normed_ptr + token * N + column, normed, mask=exists)


_add_slots = Launcher(_add_slots_kernel)
_add_slots_norm = Launcher(_add_slots_norm_kernel)


@dataclass(frozen=True)
class SlotOutputs:
    """What `problem`'s stack gave, `outputs [tokens * slots, hidden]` in the order of the pairs: a
    branch whose parts are the slots. See `BranchParts` and `naive.add_slots`."""

    problem: ExpertsProblem
    outputs: Tensor

    def sum(self) -> Tensor:
        """`[tokens, hidden]`."""
        out = torch.empty_like(self.problem.x, memory_format=torch.contiguous_format)
        tokens, hidden = out.shape
        if tokens:
            columns = min(_COLUMNS, next_power_of_2(hidden))
            _add_slots[(tokens, cdiv(hidden, columns))](
                *self._inputs, out, **self._constants, BLOCK=columns
            )
        return out

    def sum_add_norm(self, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """`(norm(s), s)` with `s = sum() + residual`, all `[tokens, hidden]`, with the bits of the
        separate launches."""
        normed, total = (
            torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2)
        )
        tokens, hidden = residual.shape
        if tokens:
            columns = next_power_of_2(hidden)
            _add_slots_norm[(tokens,)](
                *self._inputs, residual, residual.stride(0), norm.weight, norm.eps, normed, total,
                **self._constants, ONE_PLUS=norm.one_plus, BLOCK=columns,
                num_warps=row_warps(columns),
            )  # fmt: skip
        return normed, total

    @property
    def _inputs(self) -> tuple[Tensor | int | None, ...]:
        routing, shared = self.problem.routing, self.problem.shared
        stride_shared = 0 if shared is None else shared.stride(0)
        experts = self.problem.experts
        return self.outputs, routing.weights, experts, shared, experts.stride(0), stride_shared

    @property
    def _constants(self) -> dict[str, int | bool]:
        problem = self.problem
        slots = problem.experts.shape[1]
        return {
            "SLOTS": slots,
            "EXPERTS": problem.num_experts,
            "SPREAD": problem.ranks > 1,
            "SHARED": problem.shared is not None,
            "N": problem.x.shape[1],
            "BLOCK_S": next_power_of_2(slots),
            **dependent_launch(self.outputs.device),
        }


def experts_of_slots(
    outputs: Callable[[ExpertsProblem], SlotOutputs],
    takes: Callable[[ExpertsProblem], bool],
    needs: CudaOps,
) -> tuple[
    Implementation[[ExpertsProblem], Tensor],
    Implementation[[ExpertsProblem, Tensor], ResidualStream],
]:
    """`run_experts` and `run_experts_add` where `outputs` computes the slots."""

    def run(problem: ExpertsProblem) -> Tensor:
        return outputs(problem).sum()

    def run_add(problem: ExpertsProblem, residual: Tensor) -> ResidualStream:
        return ResidualStream(residual, outputs(problem))

    def takes_addition(problem: ExpertsProblem, residual: Tensor) -> bool:
        return takes(problem)

    return Implementation(run, takes, needs), Implementation(run_add, takes_addition, needs)
