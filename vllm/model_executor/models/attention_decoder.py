# SPDX-License-Identifier: Apache-2.0
"""The layer of families whose every token mixer is rotary attention: Llama, Qwen3, Mixtral."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.self_attention import SelfAttention, SelfAttentionShape
from vllm.model_executor.models.decoder import DecoderLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AttentionDecoderLayer(DecoderLayer):
    """Attention and a feed-forward network, each behind an RMS norm.

    Families give the attention's shape, and `mlp` where it is not a gated MLP.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        shape: SelfAttentionShape,
        prefix: str,
        *,
        mlp_bias: bool = False,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        quant_config = vllm_config.quant_config
        rope = get_rope(
            shape.head_dim,
            vllm_config.model_config.max_model_len,
            rope_parameters=config.rope_parameters,
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(shape, rope, f"{prefix}.self_attn", quant_config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp or GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=mlp_bias,
            prefix=f"{prefix}.mlp",
            quant_config=quant_config,
        )

    def mix_stream(
        self, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        return self.self_attn.after_norm(self.input_layernorm, positions, stream)
