# SPDX-License-Identifier: Apache-2.0
"""Ops of the interface that are one op after another, where no kernel fuses them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from vllm.kernels import fp8


class ComposedKernels(ABC):
    """See `Kernels` for every op; subclasses give the parts."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    @abstractmethod
    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
    ) -> tuple[Tensor, Tensor]: ...

    def fp8_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [m, k] fp32 @ weight [n, k].T` float8 e4m3 `-> [m, n]` fp32."""
        return fp8.widened_product(x, weight)

    def linear_silu_and_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.silu_and_mul(self.linear(x, weight, bias))

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
