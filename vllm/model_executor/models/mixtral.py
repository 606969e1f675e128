# SPDX-License-Identifier: Apache-2.0
"""Mixtral (arXiv 2401.04088): Mistral's attention, and experts in every layer."""

from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.kernels.moe import RoutingRule
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import MixtureOfExperts
from vllm.model_executor.layers.router import Router
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.llama import AttentionDecoderLayer
from vllm.model_executor.models.mistral import attention_shape
from vllm.model_executor.models.weights import WeightsMapper


def mixture_shape(config: PretrainedConfig) -> MixtureShape:
    """A softmax over the chosen logits."""
    return MixtureShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_experts=config.num_local_experts,
        rule=RoutingRule(config.num_experts_per_tok),
        hidden_act=config.hidden_act,
    )


class MixtralDecoderLayer(AttentionDecoderLayer):
    """Attention, then experts."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        mlp = MixtureOfExperts(mixture_shape(config), f"{prefix}.mlp", vllm_config.quant_config)
        super().__init__(vllm_config, attention_shape(config), prefix, mlp=mlp)


class MixtralForCausalLM(DecoderForCausalLM):
    """Checkpoints name an expert's gate, down and up projections w1, w2 and w3."""

    layer_class = MixtralDecoderLayer
    fused_names = (*DecoderForCausalLM.fused_names, *Router.CHECKPOINT_NAMES)
    stacked_names = (
        ("experts.gate_up_proj", "experts.*.w1.weight", 0),
        ("experts.gate_up_proj", "experts.*.w3.weight", 1),
        ("experts.down_proj", "experts.*.w2.weight", 0),
    )
    weights_mapper = WeightsMapper(orig_to_new_substr={".block_sparse_moe.": ".mlp."})
