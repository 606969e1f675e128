# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3 (arXiv 2407.21783): rotary attention and SwiGLU behind RMS norms."""

from dataclasses import replace

from torch import Tensor
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.self_attention import SelfAttention, SelfAttentionShape
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer, FeedForward
from vllm.model_executor.models.utils import gated_mlp, head_dim, rotary


class AttentionDecoderLayer(DecoderLayer):
    """Attention and a feed-forward network, each behind an RMS norm.

    Families give the attention's shape, and `mlp` where it is not a gated MLP.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        shape: SelfAttentionShape,
        prefix: str,
        *,
        mlp_bias: bool = False,
        mlp: FeedForward | None = None,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        quant_config = vllm_config.quant_config
        rope = rotary(vllm_config, shape.head_dim)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(shape, rope, f"{prefix}.self_attn", quant_config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp or gated_mlp(vllm_config, f"{prefix}.mlp", bias=mlp_bias)

    def mix_stream(
        self, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        return self.self_attn.after_norm(self.input_layernorm, positions, stream)


def plain_shape(config: PretrainedConfig) -> SelfAttentionShape:
    """A layer's attention without biases, from the checkpoint's config."""
    return SelfAttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
    )


def attention_shape(config: PretrainedConfig) -> SelfAttentionShape:
    """A layer's attention, with biases if the checkpoint's config says so."""
    bias = config.attention_bias
    return replace(plain_shape(config), qkv_bias=bias, o_bias=bias)


class LlamaDecoderLayer(AttentionDecoderLayer):
    """Attention and gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(vllm_config, attention_shape(config), prefix, mlp_bias=config.mlp_bias)


class LlamaForCausalLM(DecoderForCausalLM):
    """`LlamaForCausalLM` checkpoints."""

    layer_class = LlamaDecoderLayer
