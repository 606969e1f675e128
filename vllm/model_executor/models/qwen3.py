# SPDX-License-Identifier: Apache-2.0
"""Qwen3 dense (arXiv 2505.09388): Llama's form with head norms and optional sliding windows."""

from dataclasses import replace

from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.self_attention import SelfAttentionShape
from vllm.model_executor.models import llama
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.llama import AttentionDecoderLayer
from vllm.model_executor.models.utils import extract_layer_index, sliding_window


def attention_shape(config: PretrainedConfig, layer_index: int) -> SelfAttentionShape:
    """The attention of one layer; `layer_types` says which layers slide.

    Raises ValueError for an unknown layer type.
    """
    return replace(
        llama.attention_shape(config),
        eps=config.rms_norm_eps,
        qk_norm=RMSNorm,
        sliding_window=sliding_window(config, layer_index),
    )


class Qwen3DecoderLayer(AttentionDecoderLayer):
    """Attention with head norms, and gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        shape = attention_shape(config, extract_layer_index(prefix))
        super().__init__(vllm_config, shape, prefix)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """`Qwen3ForCausalLM` checkpoints."""

    layer_class = Qwen3DecoderLayer
