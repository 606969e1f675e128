# SPDX-License-Identifier: Apache-2.0
"""Bamba: Llama's frame with Mamba2 in place of most attention layers."""

from torch import Tensor

from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba2 import Mamba2
from vllm.model_executor.layers.self_attention import SelfAttention
from vllm.model_executor.models import llama
from vllm.model_executor.models.decoder import DecoderLayer
from vllm.model_executor.models.granite_moe_hybrid import mamba2_shape
from vllm.model_executor.models.hybrid import HybridForCausalLM, only_silu
from vllm.model_executor.models.utils import extract_layer_index, gated_mlp, rotary
from vllm.model_executor.models.weights import WeightsMapper


class BambaDecoderLayer(DecoderLayer):
    """Mamba2 or attention, then a gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config, quant_config = model_config.hf_text_config, vllm_config.quant_config
        self.is_recurrent = extract_layer_index(prefix) not in (config.attn_layer_indices or ())
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.is_recurrent:
            only_silu(config.hidden_act, prefix)
            self.mamba = Mamba2(mamba2_shape(config), f"{prefix}.mamba", quant_config=quant_config)
        else:
            shape = llama.attention_shape(config)
            rope = rotary(vllm_config, shape.head_dim, may_be_partial=True)
            self.self_attn = SelfAttention(shape, rope, f"{prefix}.self_attn", quant_config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = gated_mlp(vllm_config, f"{prefix}.mlp", bias=config.mlp_bias)

    def mix(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        mixed: Tensor
        if self.is_recurrent:
            mixed = self.mamba(hidden_states)
        else:
            mixed = self.self_attn(positions, hidden_states)
        return mixed


class BambaForCausalLM(HybridForCausalLM):
    """`BambaForCausalLM` checkpoints."""

    layer_class = BambaDecoderLayer
    weights_mapper = WeightsMapper(
        orig_to_new_prefix={"model.final_layernorm.": "model.norm."},
        orig_to_new_substr={
            ".feed_forward.": ".mlp.",
            ".pre_ff_layernorm.": ".post_attention_layernorm.",
        },
    )
    recurrent_shape = staticmethod(mamba2_shape)
