# SPDX-License-Identifier: Apache-2.0
"""Feed-forward networks: the gated one of most dense families, and one without gate."""

from torch import Tensor, nn

from vllm.kernels.fp8 import Fp8Rows
from vllm.kernels.moe import ClampedSwiglu
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.activation import (
    ClampedSiluAndMul,
    SiluAndMul,
    get_act_and_mul_fn,
    get_act_fn,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.quantization.unquantized import UnquantizedLinearMethod
from vllm.platforms import current_platform


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`; gate and up are one matmul.

    Without `reduce_results` the output is this rank's part of a sum over the tensor-parallel group.
    `clamp` replaces the activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str = "silu",
        bias: bool = False,
        prefix: str = "",
        quant_config: QuantizationConfig | None = None,
        *,
        reduce_results: bool = True,
        clamp: ClampedSwiglu | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=bias,
            reduce_results=reduce_results,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = get_act_and_mul_fn(hidden_act) if clamp is None else ClampedSiluAndMul(clamp)

    @property
    def takes_fp8_rows(self) -> bool:
        """Whether `forward` takes activations that the norm before has made float8."""
        return self.gate_up_proj.quant_method.takes_fp8_rows

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        return self.down_proj(self.activated(x))[0]

    def after_norm(self, norm: RMSNorm, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        """The stream, added up, with this network of its norm as a branch; and its sum."""
        if self.takes_fp8_rows and (branch := stream.added_branch) is not None:
            rows, total = norm.add_and_normalise_fp8(branch, stream.residual)
            return self.down_proj.add_to(total, self.activated(rows)), total
        if self._fuses_activation:
            weight, bias = self.gate_up_proj.weight, self.gate_up_proj.bias
            gated, total = current_platform.kernels.norm_linear_silu_and_mul(
                stream, norm.arguments, weight, bias
            )
            return self.down_proj.add_to(total, gated), total
        normed, total = norm.enter(stream)
        return self.down_proj.add_to(total, self.activated(normed)), total

    @property
    def _fuses_activation(self) -> bool:
        silu = isinstance(self.act_fn, SiluAndMul)
        return silu and isinstance(self.gate_up_proj.quant_method, UnquantizedLinearMethod)

    def activated(self, x: Tensor | Fp8Rows) -> Tensor | Fp8Rows:
        """`act(gate(x)) * up(x)`: `[tokens, hidden] -> [tokens, intermediate]` of this rank."""
        if self._fuses_activation:
            assert isinstance(x, Tensor)
            weight, bias = self.gate_up_proj.weight, self.gate_up_proj.bias
            return current_platform.kernels.linear_silu_and_mul(x, weight, bias)
        gate_up = self.gate_up_proj(x)[0]
        if isinstance(self.act_fn, SiluAndMul) and self.down_proj.quant_method.takes_fp8_rows:
            return current_platform.kernels.silu_and_mul_fp8(gate_up)
        return self.act_fn(gate_up)


class UngatedMLP(nn.Module):
    """`down(act(up(x)))`; `reduce_results` as in `GatedMLP`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str = "relu2",
        bias: bool = False,
        prefix: str = "",
        quant_config: QuantizationConfig | None = None,
        *,
        reduce_results: bool = True,
    ) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear(
            hidden_size,
            intermediate_size,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.up_proj",
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=bias,
            reduce_results=reduce_results,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = get_act_fn(hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        return self.down_proj(self.act_fn(self.up_proj(x)[0]))[0]

    def after_norm(self, norm: RMSNorm, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        """As `GatedMLP.after_norm`."""
        up, total = self.up_proj.after_norm(norm, stream)
        return self.down_proj.add_to(total, self.act_fn(up)), total
