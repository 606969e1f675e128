# SPDX-License-Identifier: Apache-2.0
"""Kimi-Linear (arXiv 2510.26692): three layers of Kimi delta attention to one of latent attention
without rotation, then experts or, in the first layers, a gated MLP."""

from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.kimi_delta_attention import (
    KimiDeltaAttention,
    KimiDeltaAttentionShape,
)
from vllm.model_executor.layers.latent_attention import MultiHeadLatentAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.moe import MixtureOfExperts
from vllm.model_executor.layers.router import Router
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.deepseek_v3 import latent_attention_shape, mixture_shape
from vllm.model_executor.models.hybrid import HybridForCausalLM, only_silu
from vllm.model_executor.models.utils import extract_layer_index, gated_mlp, serves_only
from vllm.model_executor.models.weights import WeightsMapper


def delta_attention_shape(config: PretrainedConfig) -> KimiDeltaAttentionShape:
    """The recurrent mixer of most layers."""
    return KimiDeltaAttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.linear_num_heads,
        head_dim=config.linear_head_dim,
        conv_kernel_size=config.linear_conv_kernel_dim,
        eps=config.rms_norm_eps,
    )


def check(config: PretrainedConfig) -> None:
    """Raises VLLMValidationError for what fields of released configs could say and do not."""
    serves_only(config, moe_router_activation_func="sigmoid", mla_use_nope=True, moe_layer_freq=1)


class KimiLinearDecoderLayer(DecoderLayer):
    """Delta or latent attention, then experts or a gated MLP, as the config lists."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        check(config)
        quant_config = vllm_config.quant_config
        index, name = extract_layer_index(prefix), f"{prefix}.self_attn"
        kind = config.layer_types[index]
        self.is_recurrent = kind == "linear_attention"
        self.self_attn: nn.Module
        if self.is_recurrent:
            only_silu(config.hidden_act, prefix)
            self.self_attn = KimiDeltaAttention(
                delta_attention_shape(config), name, quant_config=quant_config
            )
        elif kind == "full_attention":
            self.self_attn = MultiHeadLatentAttention(
                latent_attention_shape(config), name, quant_config
            )
        else:
            raise VLLMValidationError(
                f"{prefix} has type {kind!r}; supported: full_attention, linear_attention"
            )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.mlp_layer_types[index] == "sparse":
            shape = mixture_shape(config, config.num_local_experts)
            self.mlp = MixtureOfExperts(shape, f"{prefix}.mlp", quant_config)
        else:
            self.mlp = gated_mlp(vllm_config, f"{prefix}.mlp")

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        inputs = (hidden_states,) if self.is_recurrent else (positions, hidden_states)
        return self.self_attn(*inputs)


class KimiLinearForCausalLM(HybridForCausalLM):
    """Checkpoints name an expert's gate, down and up projections w1, w2 and w3."""

    layer_class = KimiLinearDecoderLayer
    recurrent_shape = staticmethod(delta_attention_shape)
    fused_names = (
        *DecoderForCausalLM.fused_names,
        *KimiDeltaAttention.CHECKPOINT_NAMES,
        *Router.CHECKPOINT_NAMES,
    )
    stacked_names = (
        ("experts.gate_up_proj", "experts.*.w1.weight", 0),
        ("experts.gate_up_proj", "experts.*.w3.weight", 1),
        ("experts.down_proj", "experts.*.w2.weight", 0),
        ("experts.gate_up_proj", "shared_expert.gate_proj.weight", 0),
        ("experts.gate_up_proj", "shared_expert.up_proj.weight", 1),
        ("experts.down_proj", "shared_expert.down_proj.weight", 0),
    )
    widened_names = ("kv_b_proj",)
    weights_mapper = WeightsMapper(
        orig_to_new_substr={
            ".block_sparse_moe.": ".mlp.",
            ".shared_experts.": ".shared_expert.",
        }
    )
