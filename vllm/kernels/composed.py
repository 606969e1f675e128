# SPDX-License-Identifier: Apache-2.0
"""Ops of the interface that are one op after another, where no kernel fuses them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from vllm.kernels import fp8
from vllm.kernels.residual_stream import Norm, ResidualStream, normalise


class ComposedLinears(ABC):
    """Matmuls and what is next to them, one op after another; see `Kernels` for every op."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> Tensor: ...

    @abstractmethod
    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> tuple[Tensor, Tensor]: ...

    def linear_silu_and_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.silu_and_mul(self.linear(x, weight, bias))

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> ResidualStream:
        return ResidualStream(residual, self.linear(x, weight, bias))

    def norm_linear(
        self, stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        normed, total = normalise(self, stream, norm)
        return self.linear(normed, weight, bias), total

    def norm_linear_silu_and_mul(
        self, stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        normed, total = normalise(self, stream, norm)
        return self.linear_silu_and_mul(normed, weight, bias), total


class ComposedKernels(ComposedLinears):
    """Also gates and float8, for platforms that fuse none of them."""

    @abstractmethod
    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor: ...

    def apply_gate(self, out: Tensor, gate: Tensor | None) -> None:
        """Multiply `out [tokens, heads, n]` by `sigmoid(gate)`; None: leave it."""
        if gate is not None:
            out.copy_(self.mul_sigmoid(out, gate).view(out.shape))

    def fp8_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [m, k] fp32 @ weight [n, k].T` float8 e4m3 `-> [m, n]` fp32."""
        return fp8.widened_product(x, weight)

    def linear_fp8(
        self,
        x: Tensor | fp8.Fp8Rows,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        *,
        input_scale: Tensor | None = None,
    ) -> Tensor:
        return fp8.linear_rows(x, weight, weight_scale, bias, input_scale, self.fp8_product)

    def linear_fp8_block(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        *,
        block_scale: Tensor | None = None,
    ) -> Tensor:
        return fp8.linear_groups(x, weight, weight_scale, bias, self.fp8_product)

    def silu_and_mul_fp8(self, gate_up: Tensor) -> fp8.Fp8Rows:
        return fp8.as_rows(self.silu_and_mul(gate_up))

    def fused_add_rms_norm_fp8(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> tuple[fp8.Fp8Rows, Tensor]:
        normed, total = self.fused_add_rms_norm(x, residual, weight, eps, one_plus=one_plus)
        return fp8.as_rows(normed), total


def put_rows(out: Tensor, rows: Tensor, done: Tensor | None) -> Tensor:
    """Fill `out [tokens, ...]`, but for the first tokens whose entry of `done` is not negative."""
    if done is None:
        return out.copy_(rows)
    head = out[: len(done)]
    kept = (done >= 0).view(-1, *[1] * (out.dim() - 1))
    head.copy_(head.where(kept, rows[: len(done)]))
    out[len(done) :] = rows[len(done) :]
    return out
