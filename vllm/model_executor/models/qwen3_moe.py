# SPDX-License-Identifier: Apache-2.0
"""Qwen3 with mixtures of experts (arXiv 2505.09388): Qwen3's attention, routed experts."""

from dataclasses import replace

from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.kernels.moe import RoutingRule
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.router import Router
from vllm.model_executor.layers.self_attention import SelfAttentionShape
from vllm.model_executor.models import llama
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.llama import AttentionDecoderLayer
from vllm.model_executor.models.utils import extract_layer_index


def attention_shape(config: PretrainedConfig) -> SelfAttentionShape:
    """The attention of every layer; all of them slide, or none."""
    return replace(
        llama.attention_shape(config),
        eps=config.rms_norm_eps,
        qk_norm=RMSNorm,
        sliding_window=config.sliding_window,
    )


def mixture_shape(config: PretrainedConfig) -> MixtureShape:
    """Top-k of a softmax; no shared expert."""
    return MixtureShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_experts=config.num_experts,
        rule=RoutingRule(config.num_experts_per_tok, renormalize=config.norm_topk_prob),
        hidden_act=config.hidden_act,
    )


def is_sparse(config: PretrainedConfig, layer_index: int) -> bool:
    """Whether a layer has experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    if layer_index in config.mlp_only_layers or config.num_experts == 0:
        return False
    return bool((layer_index + 1) % config.decoder_sparse_step == 0)


class Qwen3MoeDecoderLayer(AttentionDecoderLayer):
    """Attention with head norms, then experts or a gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        mlp = None
        if is_sparse(config, extract_layer_index(prefix)):
            shape = mixture_shape(config)
            mlp = MixtureOfExperts(shape, f"{prefix}.mlp", vllm_config.quant_config)
        super().__init__(vllm_config, attention_shape(config), prefix, mlp=mlp)


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """`Qwen3MoeForCausalLM` checkpoints, experts one by one or stacked."""

    layer_class = Qwen3MoeDecoderLayer
    fused_names = (*DecoderForCausalLM.fused_names, *Router.CHECKPOINT_NAMES)
    stacked_names = Experts.CHECKPOINT_NAMES
