# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms (arXiv 1910.07467)."""

from typing import ClassVar

from torch import Tensor, nn

from vllm.kernels.fp8 import Fp8Rows
from vllm.kernels.residual_stream import Norm, ResidualStream
from vllm.model_executor.parameter import default_weight_loader, empty_parameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform


class RMSNorm(nn.Module):
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last dimension.

    `forward(x)` returns the normalised tensor; `forward(x, residual)` returns
    `(norm(x + residual), x + residual)`.
    """

    one_plus: ClassVar[bool] = False
    dummy_range: ClassVar[tuple[float, float]] = (0.9, 1.1)

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.weight = empty_parameter(hidden_size)
        set_weight_attrs(
            self.weight,
            {"weight_loader": default_weight_loader, "dummy_range": self.dummy_range},
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """`x [..., n]`; with a residual both are `[tokens, n]`."""
        if residual is None:
            return self.normalise(x)
        return self.add_and_normalise(x, residual)

    def normalise(self, x: Tensor) -> Tensor:
        """`norm(x)`, `[..., n]`."""
        return current_platform.kernels.rms_norm(
            x, self.weight, self.variance_epsilon, one_plus=self.one_plus
        )

    def add_and_normalise(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`(norm(x + residual), x + residual)`, all `[tokens, n]`."""
        return current_platform.kernels.fused_add_rms_norm(
            x, residual, self.weight, self.variance_epsilon, one_plus=self.one_plus
        )

    def enter(self, stream: ResidualStream) -> tuple[Tensor, Tensor]:
        """`(norm(s), s)` of the stream's sum `s`, both `[tokens, n]`."""
        return current_platform.kernels.enter(stream, self.arguments)

    @property
    def arguments(self) -> Norm:
        """For ops that a norm is a part of."""
        return Norm(self.weight, self.variance_epsilon, self.one_plus)

    def add_and_normalise_fp8(self, x: Tensor, residual: Tensor) -> tuple[Fp8Rows, Tensor]:
        """`add_and_normalise` with the norm's result made float8 token by token."""
        return current_platform.kernels.fused_add_rms_norm_fp8(
            x, residual, self.weight, self.variance_epsilon, one_plus=self.one_plus
        )

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


class GemmaRMSNorm(RMSNorm):
    """The stored weight is the scale minus one: `norm(x) * (1 + weight)` (Gemma, Qwen3.5)."""

    one_plus = True
    dummy_range = (-0.1, 0.1)


class RMSNormGated(nn.Module):
    """`norm(x) * weight * silu(gate)` per head; one weight shared by all heads."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight = empty_parameter(hidden_size)
        set_weight_attrs(
            self.weight,
            {"weight_loader": default_weight_loader, "dummy_range": RMSNorm.dummy_range},
        )

    def forward(self, x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
        """`x, gate [tokens, heads, n] -> [tokens, heads * n]`, in `out` (may be `x`) if given."""
        return current_platform.kernels.gated_rms_norm(x, gate, self.weight, self.eps, out)
