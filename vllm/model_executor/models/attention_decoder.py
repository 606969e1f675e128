# SPDX-License-Identifier: Apache-2.0
"""The layer of families whose every token mixer is rotary attention: Llama, Qwen3, Mixtral."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.self_attention import SelfAttention, SelfAttentionShape
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.utils import gated_mlp, rotary

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class AttentionDecoderLayer(DecoderLayer):
    """Attention and a feed-forward network, each behind an RMS norm.

    Families give the attention's shape, and `mlp` where it is not a gated MLP.
    """

    attention_class: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(
        self,
        vllm_config: VllmConfig,
        shape: SelfAttentionShape,
        prefix: str,
        *,
        mlp_bias: bool = False,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        quant_config = vllm_config.quant_config
        rope = rotary(vllm_config, shape.head_dim)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.attention_class(shape, rope, f"{prefix}.self_attn", quant_config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp or gated_mlp(vllm_config, f"{prefix}.mlp", bias=mlp_bias)

    def mix_stream(
        self, positions: Tensor, stream: ResidualStream
    ) -> tuple[ResidualStream, Tensor]:
        return self.self_attn.after_norm(self.input_layernorm, positions, stream)
