# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5 dense (arXiv 2407.10671): Llama's form with biases of q, k and v."""

from dataclasses import replace

from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.model_executor.layers.self_attention import SelfAttentionShape
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.llama import AttentionDecoderLayer, plain_shape
from vllm.model_executor.models.utils import extract_layer_index, sliding_window


def attention_shape(config: PretrainedConfig, layer_index: int) -> SelfAttentionShape:
    """The attention of one layer; `layer_types` says which layers slide.

    Raises VLLMValidationError for an unknown layer type.
    """
    window = sliding_window(config, layer_index)
    return replace(plain_shape(config), qkv_bias=True, sliding_window=window)


class Qwen2DecoderLayer(AttentionDecoderLayer):
    """Attention and gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        shape = attention_shape(config, extract_layer_index(prefix))
        super().__init__(vllm_config, shape, prefix)


class Qwen2ForCausalLM(DecoderForCausalLM):
    """`Qwen2ForCausalLM` checkpoints."""

    layer_class = Qwen2DecoderLayer
