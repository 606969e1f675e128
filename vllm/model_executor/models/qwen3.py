# SPDX-License-Identifier: Apache-2.0
"""Qwen3 dense (arXiv 2505.09388): Llama's form with head norms and optional sliding windows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.self_attention import SelfAttentionShape
from vllm.model_executor.models.attention_decoder import AttentionDecoderLayer
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderModel
from vllm.model_executor.models.utils import extract_layer_index

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config import VllmConfig


def attention_shape(config: PretrainedConfig, layer_index: int) -> SelfAttentionShape:
    """The attention of one layer; `layer_types` says which layers slide.

    Raises ValueError for an unknown layer type.
    """
    kind = config.layer_types[layer_index]
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    if kind not in windows:
        raise ValueError(f"layer {layer_index} has type {kind!r}; supported: {sorted(windows)}")
    return SelfAttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        qk_norm=RMSNorm,
        sliding_window=windows[kind],
    )


class Qwen3DecoderLayer(AttentionDecoderLayer):
    """Attention with head norms, and gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        shape = attention_shape(config, extract_layer_index(prefix))
        super().__init__(vllm_config, shape, prefix)


class Qwen3Model(DecoderModel):
    """Qwen3 without the output head."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] = Qwen3DecoderLayer,
    ) -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(config, partial(layer_type, vllm_config), RMSNorm, prefix)


class Qwen3ForCausalLM(DecoderForCausalLM):
    """`Qwen3ForCausalLM` checkpoints."""

    def _init_model(
        self,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] | None = None,
    ) -> DecoderModel:
        return Qwen3Model(
            vllm_config=vllm_config, prefix=prefix, layer_type=layer_type or Qwen3DecoderLayer
        )
