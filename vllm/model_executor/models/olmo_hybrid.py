# SPDX-License-Identifier: Apache-2.0
"""OLMo-hybrid: gated delta nets with negative eigenvalues behind norms, and attention before one.

Recurrent layers are pre-norm. Attention layers read the bare stream and norm what they add to it;
their q and k norms span all heads, and released checkpoints do not rotate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetShape
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.model_executor.layers.whole_norm_attention import WholeNormAttention
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderModel
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.models.weights import WeightsMapper

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config import VllmConfig

#: of the gated norm, whatever the config's is
_GATED_NORM_EPS = 1e-5


def delta_net_shape(config: PretrainedConfig) -> GatedDeltaNetShape:
    """The recurrent mixer; transitions may have eigenvalues down to -1."""
    return GatedDeltaNetShape(
        hidden_size=config.hidden_size,
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        head_k_dim=config.linear_key_head_dim,
        head_v_dim=config.linear_value_head_dim,
        conv_kernel_size=config.linear_conv_kernel_dim,
        eps=_GATED_NORM_EPS,
        beta_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
    )


def rotation(vllm_config: VllmConfig, head_dim: int) -> RotaryEmbedding | None:
    """None where the config has no `rope_theta`, as in released checkpoints."""
    rope = vllm_config.model_config.hf_text_config.rope_parameters
    if rope is None or rope.get("rope_theta") is None:
        return None
    return get_rope(head_dim, vllm_config.model_config.max_model_len, rope_parameters=rope)


def dense_mlp(vllm_config: VllmConfig, prefix: str) -> GatedMLP:
    """The feed-forward network of every layer."""
    config = vllm_config.model_config.hf_text_config
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        prefix=f"{prefix}.mlp",
        quant_config=vllm_config.quant_config,
    )


class OlmoHybridRecurrentLayer(DecoderLayer):
    """A gated delta net and a gated MLP, each behind a norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.linear_attn = GatedDeltaNet(
            delta_net_shape(config), f"{prefix}.linear_attn", quant_config=vllm_config.quant_config
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = dense_mlp(vllm_config, prefix)

    def mix_stream(
        self, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        return self.linear_attn.after_norm(self.input_layernorm, stream)


class OlmoHybridAttentionLayer(DecoderLayer):
    """Attention and a gated MLP, each before a norm (OLMo 2, arXiv 2501.00656, section 2)."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        head_dim = config.hidden_size // config.num_attention_heads
        self.self_attn = WholeNormAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            config.rms_norm_eps,
            rotation(vllm_config, head_dim),
            bias=config.attention_bias,
            prefix=f"{prefix}.self_attn",
            quant_config=vllm_config.quant_config,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = dense_mlp(vllm_config, prefix)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: Tensor, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        total = stream.total
        mixed = self.post_attention_layernorm.normalise(self.self_attn(positions, total))
        middle = total + mixed
        fed = self.post_feedforward_layernorm.normalise(self.mlp(middle))
        return ResidualStream(middle, fed), total


class OlmoHybridModel(DecoderModel):
    """OLMo-hybrid without the output head."""

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] | None
    ) -> None:
        config = vllm_config.model_config.hf_text_config
        kinds: dict[str, type[nn.Module]] = {
            "linear_attention": OlmoHybridRecurrentLayer,
            "full_attention": OlmoHybridAttentionLayer,
        }

        def make_layer(prefix: str) -> nn.Module:
            kind = config.layer_types[extract_layer_index(prefix)]
            if kind not in kinds:
                raise ValueError(f"{prefix} has type {kind!r}; supported: {sorted(kinds)}")
            return (layer_type or kinds[kind])(vllm_config, prefix)

        super().__init__(config, make_layer, RMSNorm, prefix)


class OlmoHybridForCausalLM(DecoderForCausalLM, HasInnerState, IsHybrid):
    """`OlmoHybridForCausalLM` checkpoints, convolutions of q, k and v apart or as one."""

    fused_names = (
        ("conv1d", "q_conv1d", 0),
        ("conv1d", "k_conv1d", 1),
        ("conv1d", "v_conv1d", 2),
        *(
            (fused, name, shard)
            for fused, names in (
                ("in_proj_ba", ("b_proj", "a_proj")),
                ("in_proj_qkvz", ("q_proj", "k_proj", "v_proj", "g_proj")),
                ("in_proj", ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")),
            )
            for shard, name in enumerate(names)
        ),
        *DecoderForCausalLM.fused_names,
    )
    weights_mapper = WeightsMapper(
        orig_to_new_substr={
            ".attention_layer_norm.": ".input_layernorm.",
            ".feedforward_layer_norm.": ".post_attention_layernorm.",
            ".linear_attn.o_proj.": ".linear_attn.out_proj.",
            ".linear_attn.o_norm.": ".linear_attn.norm.",
        }
    )

    def _init_model(
        self,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] | None = None,
    ) -> DecoderModel:
        return OlmoHybridModel(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, ...], ...]:
        shape = delta_net_shape(vllm_config.model_config.hf_text_config)
        return shape.state_shape(vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        cache = vllm_config.cache_config
        return MambaStateDtypeCalculator.gated_delta_net_state_dtype(
            vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        )
