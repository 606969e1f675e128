# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3 (arXiv 2407.21783): rotary attention and SwiGLU behind RMS norms."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.self_attention import SelfAttention, SelfAttentionShape
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config import VllmConfig


def attention_shape(config: PretrainedConfig) -> SelfAttentionShape:
    """A layer's attention, from the checkpoint's config."""
    return SelfAttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
    )


class LlamaDecoderLayer(DecoderLayer):
    """Attention and gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        quant_config = vllm_config.quant_config
        rope = get_rope(
            config.head_dim,
            vllm_config.model_config.max_model_len,
            rope_parameters=config.rope_parameters,
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(
            attention_shape(config), rope, f"{prefix}.self_attn", quant_config
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.mlp_bias,
            prefix=f"{prefix}.mlp",
            quant_config=quant_config,
        )

    def mix_stream(
        self, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        return self.self_attn.after_norm(self.input_layernorm, positions, stream)


class LlamaModel(DecoderModel):
    """Llama without the output head."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] = LlamaDecoderLayer,
    ) -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(config, partial(layer_type, vllm_config), RMSNorm, prefix)


class LlamaForCausalLM(DecoderForCausalLM):
    """`LlamaForCausalLM` checkpoints."""

    def _init_model(
        self,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] | None = None,
    ) -> DecoderModel:
        return LlamaModel(
            vllm_config=vllm_config, prefix=prefix, layer_type=layer_type or LlamaDecoderLayer
        )
