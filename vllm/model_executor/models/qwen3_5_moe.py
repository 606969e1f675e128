# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 with mixtures of experts: the dense model's mixers, then routed experts and a shared one.

The shared expert's output is multiplied by a gate of its own.
"""

from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.kernels.moe import RoutingRule
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.router import Router
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
)


def mixture_shape(config: PretrainedConfig) -> MixtureShape:
    """Top-k of a softmax, renormalised, and a gated shared expert."""
    return MixtureShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        rule=RoutingRule(config.num_experts_per_tok),
        shared_intermediate_size=config.shared_expert_intermediate_size,
        shared_gate=True,
        hidden_act=config.hidden_act,
    )


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):
    """Gated delta net or gated attention, then experts."""

    def make_mlp(self, vllm_config: VllmConfig, prefix: str) -> MixtureOfExperts:
        shape = mixture_shape(vllm_config.model_config.hf_text_config)
        return MixtureOfExperts(shape, prefix, vllm_config.quant_config)


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Text checkpoints, and multimodal ones served as text: `text_config` is the model."""

    layer_class = Qwen3_5MoeDecoderLayer
    fused_names = (*Qwen3_5ForCausalLM.fused_names, *Router.GATED_CHECKPOINT_NAMES)
    stacked_names = Experts.CHECKPOINT_NAMES
    unused_weights = {
        **Qwen3_5ForCausalLM.unused_weights,
        "mtp.": "no speculative method of this engine drafts with a mixture's head",
    }
