# SPDX-License-Identifier: Apache-2.0
"""gpt-oss (arXiv 2508.10925): attention sinks, alternating windows, experts with biases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.kernels.moe import ClampedSwiglu
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts, MixtureShape
from vllm.model_executor.layers.self_attention import SelfAttentionShape
from vllm.model_executor.models import llama, mixtral
from vllm.model_executor.models.attention_decoder import AttentionDecoderLayer
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.gpt_oss_weights import experts_apart
from vllm.model_executor.models.utils import extract_layer_index, sliding_window

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from transformers import PretrainedConfig

    from vllm.config import VllmConfig

#: of the activation, where the config does not say: it has learned to only lately
_ALPHA, _LIMIT = 1.702, 7.0


def attention_shape(config: PretrainedConfig, layer_index: int) -> SelfAttentionShape:
    """The attention of one layer; `layer_types` says which layers slide.

    Raises ValueError for an unknown layer type.
    """
    return replace(
        llama.attention_shape(config),
        sliding_window=sliding_window(config, layer_index),
        sinks=True,
    )


def mixture_shape(config: PretrainedConfig) -> MixtureShape:
    """A softmax over the chosen logits; biases everywhere."""
    fields = config.to_dict()
    return replace(
        mixtral.mixture_shape(config),
        router_bias=True,
        expert_biases=True,
        clamp=ClampedSwiglu(
            float(fields.get("swiglu_alpha", _ALPHA)), float(fields.get("swiglu_limit", _LIMIT))
        ),
    )


class GptOssDecoderLayer(AttentionDecoderLayer):
    """Attention with sinks, then experts."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        shape = attention_shape(config, extract_layer_index(prefix))
        mlp = MixtureOfExperts(mixture_shape(config), f"{prefix}.mlp", vllm_config.quant_config)
        super().__init__(vllm_config, shape, prefix, mlp=mlp)


class GptOssForCausalLM(DecoderForCausalLM):
    """`GptOssForCausalLM` checkpoints, experts in mxfp4 or in 16 bits."""

    layer_class = GptOssDecoderLayer
    fused_names = (*DecoderForCausalLM.fused_names, ("router", "router", 0))
    stacked_names = Experts.CHECKPOINT_NAMES

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(experts_apart(weights, self.dtype))
