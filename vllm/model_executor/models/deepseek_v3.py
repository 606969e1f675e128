# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 (arXiv 2412.19437): latent attention with rotation in every layer, gated MLPs in the
first layers and experts in the others."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from vllm import decisions
from vllm.config import VllmConfig
from vllm.kernels.moe import RoutingRule
from vllm.model_executor.layers.latent_attention import (
    LatentAttentionShape,
    MultiHeadLatentAttention,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.router import Router
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.utils import (
    extract_layer_index,
    gated_mlp,
    refuse_partial,
    serves_only,
)
from vllm.model_executor.models.weights import WeightsMapper


def latent_attention_shape(config: PretrainedConfig) -> LatentAttentionShape:
    """The attention of every layer."""
    return LatentAttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        nope_dim=config.qk_nope_head_dim,
        shared_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        latent_dim=config.kv_lora_rank,
        query_latent_dim=config.q_lora_rank,
        bias=config.attention_bias,
    )


def routing_rule(config: PretrainedConfig) -> RoutingRule:
    """Sigmoid scores, chosen in the best groups."""
    return RoutingRule(
        config.num_experts_per_tok,
        scores="sigmoid",
        renormalize=config.norm_topk_prob,
        epsilon=1e-20,
        num_groups=config.n_group,
        top_groups=config.topk_group,
        group_score="top2",
        scale=config.routed_scaling_factor,
    )


def mixture_shape(config: PretrainedConfig, num_experts: int) -> MixtureShape:
    """`routing_rule` with a correction bias; shared experts as one."""
    return MixtureShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_experts=num_experts,
        rule=routing_rule(config),
        shared_intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
        correction_bias=True,
        hidden_act=config.hidden_act,
        wide_router=True,
    )


def _temperature(factor: float, strength: float) -> float:
    """YaRN's (arXiv 2309.00071, section 3.4), of a context stretched by `factor`."""
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_and_scale(config: PretrainedConfig) -> tuple[dict[str, Any], float]:
    """`rope_parameters` without what this family adds to YaRN, and the scale of attention.

    With `mscale_all_dim` the temperature of that strength, squared, is part of the scale, for it is
    meant for all dimensions; those that rotate have had `mscale` instead if both are given.
    Raises VLLMValidationError for a rotation of a part of `qk_rope_head_dim`.
    """
    rope = dict(config.rope_parameters)
    refuse_partial(rope)
    rotating, all_dims = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    if rope.get("rope_type", "default") == "default" or not all_dims:
        return rope, scale
    factor = float(rope["factor"])
    temperature = _temperature(factor, all_dims)
    if rotating and rope.get("attention_factor") is None:
        rope["attention_factor"] = _temperature(factor, rotating) / temperature
    return rope, scale * temperature**2


class DeepseekV3DecoderLayer(DecoderLayer):
    """Latent attention, then a gated MLP or experts."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        quant_config = vllm_config.quant_config
        rope, scale = rope_and_scale(config)
        self.self_attn = MultiHeadLatentAttention(
            latent_attention_shape(config),
            f"{prefix}.self_attn",
            quant_config,
            get_rope(
                config.qk_rope_head_dim,
                vllm_config.model_config.max_model_len,
                rope_parameters=rope,
            ),
            interleaved=self.is_interleaved(config),
            scale=scale,
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if extract_layer_index(prefix) >= config.first_k_dense_replace:
            shape = self.mixture(config, f"{prefix}.mlp")
            self.mlp = MixtureOfExperts(shape, f"{prefix}.mlp", quant_config)
        else:
            self.mlp = gated_mlp(vllm_config, f"{prefix}.mlp")

    @staticmethod
    def is_interleaved(config: PretrainedConfig) -> bool:
        """Whether neighbouring dimensions rotate together."""
        return bool(config.rope_interleave)

    @staticmethod
    def mixture(config: PretrainedConfig, prefix: str) -> MixtureShape:
        """Of a layer with experts; ValueError for one that is not supported."""
        serves_only(config, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
        return mixture_shape(config, config.n_routed_experts)

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.self_attn(positions, hidden_states)


def without_drafting_layers(
    weights: Iterable[tuple[str, Tensor]], num_layers: int
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint without the layers after the last, which predict further tokens."""
    for name, tensor in weights:
        parts = name.split(".")
        if parts[:2] == ["model", "layers"] and int(parts[2]) >= num_layers:
            decisions.record(
                f"checkpoint tensors model.layers.{parts[2]}.*",
                "not loaded",
                "no speculative method of this engine drafts with a mixture's head",
                "loading them",
            )
            continue
        yield name, tensor


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    """`DeepseekV3ForCausalLM` checkpoints, experts one by one."""

    layer_class = DeepseekV3DecoderLayer
    fused_names = (*DecoderForCausalLM.fused_names, *Router.CHECKPOINT_NAMES)
    stacked_names = Experts.CHECKPOINT_NAMES
    widened_names = ("kv_b_proj",)
    weights_mapper = WeightsMapper(orig_to_new_substr={".shared_experts.": ".shared_expert."})

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        num_layers = self.config.num_hidden_layers
        return super().load_weights(without_drafting_layers(weights, num_layers))
