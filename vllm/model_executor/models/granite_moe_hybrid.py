# SPDX-License-Identifier: Apache-2.0
"""Granite 4 hybrids: Mamba2 or attention, then experts, a shared network or both.

What enters the residual stream, attention's products and the logits have multipliers.
"""

from dataclasses import replace

from torch import Tensor
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba2 import Mamba2, Mamba2Shape
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, no_rope
from vllm.model_executor.layers.router import Router
from vllm.model_executor.layers.self_attention import SelfAttention, SelfAttentionShape
from vllm.model_executor.models import llama, mixtral
from vllm.model_executor.models.decoder import DecoderLayer, FeedForward
from vllm.model_executor.models.hybrid import (
    HybridForCausalLM,
    MultipliedEmbeddingsModel,
    multiplied,
    only_silu,
)
from vllm.model_executor.models.utils import extract_layer_index, head_dim, rotary
from vllm.model_executor.models.weights import WeightsMapper

#: entries of `layer_types`, whose names changed with transformers 5.18
_MAMBA = ("mamba", "linear_attention")
_ATTENTION = ("attention", "full_attention")


def mamba2_shape(config: PretrainedConfig) -> Mamba2Shape:
    """The recurrent layers."""
    return Mamba2Shape(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        state_size=config.mamba_d_state,
        num_groups=config.mamba_n_groups,
        conv_kernel_size=config.mamba_d_conv,
        eps=config.rms_norm_eps,
        norm_groups=config.mamba_n_groups,
        conv_bias=config.mamba_conv_bias,
        proj_bias=config.mamba_proj_bias,
        dt_limit=tuple(config.time_step_limit),
    )


def attention_shape(config: PretrainedConfig) -> SelfAttentionShape:
    """The attention layers."""
    return replace(llama.attention_shape(config), scale=config.attention_multiplier)


def mixture_shape(config: PretrainedConfig) -> MixtureShape:
    """A softmax over the chosen logits, and the shared network as an expert that is added."""
    return replace(
        mixtral.mixture_shape(config), shared_intermediate_size=config.shared_intermediate_size
    )


def _rope(vllm_config: VllmConfig) -> RotaryEmbedding:
    config = vllm_config.model_config.hf_text_config
    kind = config.position_embedding_type
    if kind in (None, "nope"):
        return no_rope(head_dim(config), vllm_config.model_config.max_model_len)
    if kind != "rope":
        raise VLLMValidationError(
            f"position_embedding_type {kind!r} is not supported; supported: nope, rope"
        )
    return rotary(vllm_config, head_dim(config))


class GraniteMoeHybridDecoderLayer(DecoderLayer):
    """A mixer and a feed-forward network, each behind a norm and before a multiplier."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config, quant_config = model_config.hf_text_config, vllm_config.quant_config
        kind = config.layers_block_type[extract_layer_index(prefix)]
        self.is_recurrent = kind in _MAMBA
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.is_recurrent:
            only_silu(config.hidden_act, prefix)
            self.mamba = Mamba2(mamba2_shape(config), f"{prefix}.mamba", quant_config=quant_config)
        elif kind in _ATTENTION:
            rope = _rope(vllm_config)
            self.self_attn = SelfAttention(
                attention_shape(config), rope, f"{prefix}.self_attn", quant_config
            )
        else:
            raise VLLMValidationError(f"{prefix} has type {kind!r}; supported: mamba, attention")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _new_mlp(vllm_config, f"{prefix}.mlp")

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        mixed: Tensor
        if self.is_recurrent:
            mixed = self.mamba(hidden_states)
        else:
            mixed = self.self_attn(positions, hidden_states)
        return multiplied(mixed, self.residual_multiplier)

    def forward(self, positions: Tensor, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        stream, total = self.mix_stream(positions, stream)
        normed, residual = self.post_attention_layernorm.enter(stream)
        branch = multiplied(self.mlp(normed), self.residual_multiplier)
        return ResidualStream(residual, branch), total


def _new_mlp(vllm_config: VllmConfig, prefix: str) -> FeedForward:
    config, quant_config = vllm_config.model_config.hf_text_config, vllm_config.quant_config
    if config.num_local_experts:
        return MixtureOfExperts(mixture_shape(config), prefix, quant_config)
    return GatedMLP(
        config.hidden_size,
        config.shared_intermediate_size,
        config.hidden_act,
        prefix=prefix,
        quant_config=quant_config,
    )


class GraniteMoeHybridForCausalLM(HybridForCausalLM):
    """`GraniteMoeHybridForCausalLM` checkpoints, with experts or without: those of a layer as one
    tensor, as released ones, or one by one, as llm-compressor writes them."""

    layer_class = GraniteMoeHybridDecoderLayer
    model_class = MultipliedEmbeddingsModel
    fused_names = (*HybridForCausalLM.fused_names, *Router.CHECKPOINT_NAMES)
    stacked_names = (
        *Experts.CHECKPOINT_NAMES[:3],
        ("experts.gate_up_proj", "shared_expert.gate_up_proj.weight", (0, 1)),
        ("experts.down_proj", "shared_expert.down_proj.weight", 0),
    )
    recurrent_shape = staticmethod(mamba2_shape)

    def names_in(self, config: PretrainedConfig) -> WeightsMapper:
        return _names(bool(config.num_local_experts))

    @staticmethod
    def logits_scale(config: PretrainedConfig) -> float:
        return 1 / config.logits_scaling


def _names(has_experts: bool) -> WeightsMapper:
    """From the checkpoint's names; its shared network is all there is of a dense layer."""
    shared = ".mlp.shared_expert." if has_experts else ".mlp."
    return WeightsMapper(
        orig_to_new_substr={
            ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
            ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
            ".block_sparse_moe.experts.": ".mlp.experts.",
            ".block_sparse_moe.router.layer.": ".mlp.gate.",
            ".shared_mlp.input_linear.": f"{shared}gate_up_proj.",
            ".shared_mlp.output_linear.": f"{shared}down_proj.",
        }
    )
