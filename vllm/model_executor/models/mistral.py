# SPDX-License-Identifier: Apache-2.0
"""Mistral (arXiv 2310.06825): Llama's form, whose layers all slide, or none."""

from dataclasses import replace

from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.model_executor.layers.self_attention import SelfAttentionShape
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.llama import AttentionDecoderLayer, plain_shape


def attention_shape(config: PretrainedConfig) -> SelfAttentionShape:
    """The attention of every layer."""
    return replace(plain_shape(config), sliding_window=config.sliding_window)


class MistralDecoderLayer(AttentionDecoderLayer):
    """Attention and gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(vllm_config, attention_shape(config), prefix)


class MistralForCausalLM(DecoderForCausalLM):
    """`MistralForCausalLM` checkpoints."""

    layer_class = MistralDecoderLayer
