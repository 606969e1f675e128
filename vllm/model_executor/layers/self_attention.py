# SPDX-License-Identifier: Apache-2.0
"""Projections around softmax attention, with the variations of the dense families."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.distributed.utils import check_shared_evenly, per_rank
from vllm.exceptions import VLLMValidationError
from vllm.kernels.attention import QueryRows
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.parameter import empty_parameter, sections_loader, sharded_section
from vllm.model_executor.utils import set_weight_attrs


@dataclass(frozen=True)
class SelfAttentionShape:
    """Sizes of the whole layer before sharding, and what it has beyond the plain form.

    `qk_norm`: class of the per-head norms of q and k, None for none. `gated`: `q_proj` gives each
    head `[q | gate]` and the output is multiplied by `sigmoid(gate)` before `o_proj`.
    `sliding_window`: tokens a query sees, itself included; None for all. `input_size`: width of
    what q, k and v are projected from; None: `hidden_size`. `scale`: what products of q and k are
    multiplied by; None: `head_dim**-0.5`. `rows`: what a request's tokens see. `sinks`: whether
    each head has a learned one (`AttentionProblem`).

    VLLMValidationError for query heads that key/value heads cannot share evenly, and for a window
    of no token.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: type[RMSNorm] | None = None
    gated: bool = False
    sliding_window: int | None = None
    input_size: int | None = None
    scale: float | None = None
    rows: QueryRows = QueryRows.TOKENS
    sinks: bool = False

    def __post_init__(self) -> None:
        check_shared_evenly(self.num_heads, "query heads", self.num_kv_heads, "key/value heads")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise VLLMValidationError(
                f"sliding_window {self.sliding_window} is not supported; a query sees at least 1 "
                "token, itself",
                "model",
            )


def attention_sinks(num_heads: int) -> nn.Parameter:
    """This rank's, fp32: they are added to exponentials of scores."""
    section = sharded_section(num_heads)
    param = empty_parameter(section.local_size, dtype=torch.float32)
    set_weight_attrs(
        param, {"weight_loader": sections_loader((section,)), "dummy_range": (-1.0, 1.0)}
    )
    return param


class SelfAttention(nn.Module):
    """qkv projection, head norms, rotation, attention, optional gate, output projection."""

    def __init__(
        self,
        shape: SelfAttentionShape,
        rotary_emb: RotaryEmbedding,
        prefix: str = "",
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        self.gated = shape.gated
        self.num_heads = per_rank("attention heads", shape.num_heads, tp_size)
        q_heads = shape.num_heads * (2 if shape.gated else 1)
        self.qkv_proj = QKVParallelLinear(
            shape.input_size or shape.hidden_size,
            shape.head_dim,
            q_heads,
            shape.num_kv_heads,
            bias=shape.qkv_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            shape.num_heads * shape.head_dim,
            shape.hidden_size,
            bias=shape.o_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if shape.qk_norm is not None:
            self.q_norm = shape.qk_norm(shape.head_dim, shape.eps)
            self.k_norm = shape.qk_norm(shape.head_dim, shape.eps)
        self.sinks = attention_sinks(shape.num_heads) if shape.sinks else None
        self.rotary_emb = rotary_emb
        self.attn = Attention(
            self.num_heads,
            shape.head_dim,
            shape.head_dim**-0.5 if shape.scale is None else shape.scale,
            self.qkv_proj.num_kv_heads,
            per_layer_sliding_window=shape.sliding_window,
            prefix=f"{prefix}.attn",
            rows=shape.rows,
            sinks=self.sinks,
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """`positions [tokens]` int64, `hidden_states [tokens, input] -> [tokens, hidden]`."""
        qkv, _ = self.qkv_proj(hidden_states)
        return self.o_proj(self._attend(positions, qkv))[0]

    def keep(self, positions: Tensor, hidden_states: Tensor) -> None:
        """Keep the keys and values that `forward` keeps, and attend to none."""
        kv = self.qkv_proj.keys_and_values(hidden_states)
        self.attn.write_kv(kv, positions, self.rotary_emb.cos_sin_cache, self.k_norm)

    def keep_after_norm(self, norm: RMSNorm, positions: Tensor, stream: ResidualStream) -> None:
        """Keep the keys and values that `after_norm` keeps."""
        self.keep(positions, norm.enter(stream)[0])

    def after_norm(
        self, norm: RMSNorm, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        """The stream, added up, with this attention of its norm as a branch; and its sum."""
        qkv, total = self.qkv_proj.after_norm(norm, stream)
        return self.o_proj.add_to(total, self._attend(positions, qkv)), total

    def _attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        attended = self.attn.forward_qkv(
            qkv,
            positions,
            self.rotary_emb.cos_sin_cache,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            gated=self.gated,
        )
        return attended.flatten(1)
