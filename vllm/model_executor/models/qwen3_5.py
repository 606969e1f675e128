# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 dense: three gated-delta-net layers to one layer of gated attention."""

from dataclasses import replace

from torch import Tensor
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetShape
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.self_attention import SelfAttention, SelfAttentionShape
from vllm.model_executor.models import llama
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer, FeedForward
from vllm.model_executor.models.hybrid import HybridForCausalLM, only_silu
from vllm.model_executor.models.utils import extract_layer_index, gated_mlp, rotary
from vllm.model_executor.models.weights import WeightsMapper


def attention_shape(config: PretrainedConfig) -> SelfAttentionShape:
    """The gated attention of every fourth layer."""
    return replace(
        llama.attention_shape(config),
        eps=config.rms_norm_eps,
        qk_norm=GemmaRMSNorm,
        gated=True,
    )


def delta_net_shape(config: PretrainedConfig) -> GatedDeltaNetShape:
    """The recurrent mixer of the other layers."""
    return GatedDeltaNetShape(
        hidden_size=config.hidden_size,
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        head_k_dim=config.linear_key_head_dim,
        head_v_dim=config.linear_value_head_dim,
        conv_kernel_size=config.linear_conv_kernel_dim,
        eps=config.rms_norm_eps,
    )


class Qwen3_5DecoderLayer(DecoderLayer):
    """Gated delta net or gated attention, then `make_mlp`'s network; norms scale by 1 + weight."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", kind: str | None = None) -> None:
        """`kind`: of a layer that the config does not list."""
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        quant_config = vllm_config.quant_config
        kind = kind or config.layer_types[extract_layer_index(prefix)]
        self.is_recurrent = kind == "linear_attention"
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.is_recurrent:
            only_silu(config.hidden_act, prefix)
            self.linear_attn = GatedDeltaNet(
                delta_net_shape(config), f"{prefix}.linear_attn", quant_config=quant_config
            )
        elif kind == "full_attention":
            rope = rotary(vllm_config, config.head_dim, may_be_partial=True)
            self.self_attn = SelfAttention(
                attention_shape(config), rope, f"{prefix}.self_attn", quant_config
            )
        else:
            raise VLLMValidationError(
                f"{prefix} has type {kind!r}; supported: full_attention, linear_attention"
            )
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = self.make_mlp(vllm_config, f"{prefix}.mlp")

    def make_mlp(self, vllm_config: VllmConfig, prefix: str) -> FeedForward:
        """The feed-forward network of the layer."""
        return gated_mlp(vllm_config, prefix)

    def mix_stream(
        self, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        if self.is_recurrent:
            return self.linear_attn.after_norm(self.input_layernorm, positions, stream)
        return self.self_attn.after_norm(self.input_layernorm, positions, stream)


class Qwen3_5ForCausalLM(HybridForCausalLM):
    """Text checkpoints, and multimodal ones served as text: `text_config` is the model."""

    layer_class = Qwen3_5DecoderLayer
    norm_class = GemmaRMSNorm
    recurrent_shape = staticmethod(delta_net_shape)
    fused_names = (*DecoderForCausalLM.fused_names, *GatedDeltaNet.CHECKPOINT_NAMES)
    weights_mapper = WeightsMapper(orig_to_new_prefix={"model.language_model.": "model."})
    unused_weights = {
        "mtp.": "the head drafts, and method mtp of --speculative-config loads it by itself",
        "model.visual.": "only text is served",
    }
