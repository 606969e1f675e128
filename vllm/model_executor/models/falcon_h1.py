# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1 (arXiv 2507.22448): every layer has attention and Mamba2 side by side.

Both read one norm, and their sum is one branch of the residual stream. Activations have multipliers
(maximal-update parametrisation) that the config lists.
"""

from dataclasses import replace

from torch import Tensor
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.kernels.fp8 import Fp8Rows
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba2 import Mamba2, Mamba2Shape
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.self_attention import SelfAttention, SelfAttentionShape
from vllm.model_executor.models import granite_moe_hybrid, llama
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.hybrid import (
    HybridForCausalLM,
    MultipliedEmbeddingsModel,
    multiplied,
    only_silu,
)
from vllm.model_executor.models.utils import head_dim, rotary
from vllm.model_executor.models.weights import WeightsMapper


def mamba2_shape(config: PretrainedConfig) -> Mamba2Shape:
    """The recurrent mixer, with or without a norm at its gate."""
    return replace(
        granite_moe_hybrid.mamba2_shape(config),
        norm_groups=config.mamba_n_groups if config.mamba_rms_norm else 0,
        norm_before_gate=config.mamba_norm_before_gate,
        out_bias=config.projectors_bias,
        multipliers=tuple(config.ssm_multipliers),
    )


def attention_shape(config: PretrainedConfig) -> SelfAttentionShape:
    """Rotary attention. The keys' multiplier is a factor of every product with a query."""
    scale = head_dim(config) ** -0.5 * config.key_multiplier
    return replace(llama.attention_shape(config), scale=scale)


class FalconH1MLP(GatedMLP):
    """`down(silu(gate(x) * first) * up(x)) * second`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.mlp_bias,
            prefix=prefix,
            quant_config=vllm_config.quant_config,
        )
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        gate_up: Tensor = self.gate_up_proj(x)[0]
        if self.gate_multiplier != 1.0:
            gate_up.chunk(2, dim=-1)[0].mul_(self.gate_multiplier)
        out: Tensor = self.down_proj(self.act_fn(gate_up))[0]
        return multiplied(out, self.down_multiplier)


class FalconH1DecoderLayer(DecoderLayer):
    """Attention beside Mamba2, then a gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config, quant_config = model_config.hf_text_config, vllm_config.quant_config
        only_silu(config.hidden_act, prefix)
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mamba = Mamba2(mamba2_shape(config), f"{prefix}.mamba", quant_config=quant_config)
        rope = rotary(vllm_config, head_dim(config))
        self.self_attn = SelfAttention(
            attention_shape(config), rope, f"{prefix}.self_attn", quant_config
        )
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = FalconH1MLP(vllm_config, f"{prefix}.feed_forward")

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        config = self.config
        recurrent = self.mamba(multiplied(hidden_states, config.ssm_in_multiplier))
        attended = self.self_attn(
            positions, multiplied(hidden_states, config.attention_in_multiplier)
        )
        recurrent = multiplied(recurrent, config.ssm_out_multiplier)
        return recurrent + multiplied(attended, config.attention_out_multiplier)

    def forward(self, positions: Tensor, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        stream, total = self.mix_stream(positions, stream)
        normed, residual = self.pre_ff_layernorm.enter(stream)
        return ResidualStream(residual, self.feed_forward(normed)), total


class FalconH1ForCausalLM(HybridForCausalLM):
    """`FalconH1ForCausalLM` checkpoints."""

    layer_class = FalconH1DecoderLayer
    model_class = MultipliedEmbeddingsModel
    weights_mapper = WeightsMapper(orig_to_new_prefix={"model.final_layernorm.": "model.norm."})
    recurrent_shape = staticmethod(mamba2_shape)

    @staticmethod
    def logits_scale(config: PretrainedConfig) -> float:
        return config.lm_head_multiplier
