# SPDX-License-Identifier: Apache-2.0
"""OLMo-hybrid: gated delta nets with negative eigenvalues behind norms, and attention before one.

Recurrent layers are pre-norm. Attention layers read the bare stream and norm what they add to it;
their q and k norms span all heads, and released checkpoints do not rotate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetShape
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.model_executor.layers.whole_norm_attention import WholeNormAttention
from vllm.model_executor.models import qwen3_5
from vllm.model_executor.models.decoder import DecoderForCausalLM, DecoderLayer
from vllm.model_executor.models.hybrid import HybridForCausalLM
from vllm.model_executor.models.utils import extract_layer_index, gated_mlp
from vllm.model_executor.models.weights import WeightsMapper

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config import VllmConfig

#: of the gated norm, whatever the config's is
_GATED_NORM_EPS = 1e-5


def delta_net_shape(config: PretrainedConfig) -> GatedDeltaNetShape:
    """The recurrent mixer; transitions may have eigenvalues down to -1."""
    return replace(
        qwen3_5.delta_net_shape(config),
        eps=_GATED_NORM_EPS,
        beta_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
    )


def rotation(vllm_config: VllmConfig, head_dim: int) -> RotaryEmbedding | None:
    """None where the config has no `rope_theta`, as in released checkpoints."""
    rope = vllm_config.model_config.hf_text_config.rope_parameters
    if rope is None or rope.get("rope_theta") is None:
        return None
    return get_rope(head_dim, vllm_config.model_config.max_model_len, rope_parameters=rope)


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
        self.mlp = gated_mlp(vllm_config, f"{prefix}.mlp")

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
        self.mlp = gated_mlp(vllm_config, f"{prefix}.mlp")
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: Tensor, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        total = stream.total
        mixed = self.post_attention_layernorm.normalise(self.self_attn(positions, total))
        middle = total + mixed
        fed = self.post_feedforward_layernorm.normalise(self.mlp(middle))
        return ResidualStream(middle, fed), total


def new_layer(vllm_config: VllmConfig, prefix: str = "") -> DecoderLayer:
    """The layer of the kind that the config lists."""
    kind = vllm_config.model_config.hf_text_config.layer_types[extract_layer_index(prefix)]
    if kind == "linear_attention":
        return OlmoHybridRecurrentLayer(vllm_config, prefix)
    if kind == "full_attention":
        return OlmoHybridAttentionLayer(vllm_config, prefix)
    supported = ["full_attention", "linear_attention"]
    raise ValueError(f"{prefix} has type {kind!r}; supported: {supported}")


class OlmoHybridForCausalLM(HybridForCausalLM):
    """`OlmoHybridForCausalLM` checkpoints, convolutions of q, k and v apart or as one."""

    layer_class = staticmethod(new_layer)
    recurrent_shape = staticmethod(delta_net_shape)
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
