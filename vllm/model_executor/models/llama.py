# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3 (arXiv 2407.21783): rotary attention and SwiGLU behind RMS norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.layers.self_attention import SelfAttentionShape
from vllm.model_executor.models.attention_decoder import AttentionDecoderLayer
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.utils import head_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config import VllmConfig


def attention_shape(config: PretrainedConfig) -> SelfAttentionShape:
    """A layer's attention, from the checkpoint's config."""
    return SelfAttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
    )


class LlamaDecoderLayer(AttentionDecoderLayer):
    """Attention and gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(vllm_config, attention_shape(config), prefix, mlp_bias=config.mlp_bias)


class LlamaForCausalLM(DecoderForCausalLM):
    """`LlamaForCausalLM` checkpoints."""

    layer_class = LlamaDecoderLayer
