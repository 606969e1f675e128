# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward network shared by the dense families."""

from torch import Tensor, nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`; gate and up are one matmul."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str = "silu",
        bias: bool = False,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias=bias, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias=bias, prefix=f"{prefix}.down_proj"
        )
        self.act_fn = get_act_and_mul_fn(hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`."""
        gate_up, _ = self.gate_up_proj(x)
        out: Tensor = self.down_proj(self.act_fn(gate_up))[0]
        return out
