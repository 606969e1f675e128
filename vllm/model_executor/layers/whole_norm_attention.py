# SPDX-License-Identifier: Apache-2.0
"""Softmax attention whose q and k norms span all heads (OLMo 2, arXiv 2501.00656, section 2)."""

from __future__ import annotations

from torch import Tensor, nn

from vllm.distributed.collective import Collective, Communicates
from vllm.distributed.communication_op import tensor_model_parallel_all_gather
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.utils import divide, per_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


class WholeNormAttention(nn.Module, Communicates):
    """Projections, norms of all of q and all of k, rotation if any, attention.

    A rank gathers the others' heads for the norms, so its bits are those of one rank.

    Raises:
        ValueError: kv heads that the ranks cannot share out evenly.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        rotary_emb: RotaryEmbedding | None,
        *,
        bias: bool = False,
        prefix: str = "",
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        self.tp_size = get_tensor_model_parallel_world_size()
        heads = per_rank("attention heads", num_heads, self.tp_size)
        kv_heads = per_rank("key/value heads under a norm", num_kv_heads, self.tp_size)
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            head_dim,
            num_heads,
            num_kv_heads,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            num_heads * head_dim,
            hidden_size,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = RMSNorm(num_heads * head_dim, eps)
        self.k_norm = RMSNorm(num_kv_heads * head_dim, eps)
        self.rotary_emb = rotary_emb
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.attn = Attention(heads, head_dim, head_dim**-0.5, kv_heads, prefix=f"{prefix}.attn")

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """`positions [tokens]` int64, `hidden_states [tokens, hidden] -> [tokens, hidden]`."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split(self.sizes, dim=-1)
        q, k = self._normalised(q, self.q_norm), self._normalised(k, self.k_norm)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        out: Tensor = self.o_proj(self.attn(q, k, v))[0]
        return out

    def collectives(self, element_bytes: int) -> list[Collective]:
        """See `Communicates`: queries and keys meet for their norms."""
        if self.tp_size == 1:
            return []
        q, k, _ = self.sizes
        return [Collective("all-gather", "norms", size * element_bytes) for size in (q, k)]

    def _normalised(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """This rank's part of the norm over all ranks' `x [tokens, n]`."""
        if self.tp_size == 1:
            return norm.normalise(x)
        whole = norm.normalise(tensor_model_parallel_all_gather(x.contiguous()))
        size = divide(whole.shape[1], self.tp_size)
        return whole.narrow(1, get_tensor_model_parallel_rank() * size, size)
