# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: every layer is one of Mamba2, attention, a
feed-forward network and a mixture of experts, in an order that the config lists."""

from functools import partial

from torch import Tensor, nn
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba2 import Mamba2, Mamba2Shape
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.mlp import UngatedMLP
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.rotary_embedding import no_rope
from vllm.model_executor.layers.router import Router
from vllm.model_executor.layers.self_attention import SelfAttention, SelfAttentionShape
from vllm.model_executor.models.decoder import DecoderLayer, DecoderModel
from vllm.model_executor.models.deepseek_v3 import routing_rule
from vllm.model_executor.models.hybrid import HybridForCausalLM, only_silu
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.models.weights import WeightsMapper

#: entries of `layers_block_type`, whose names changed with transformers 5.18
_MAMBA = ("mamba", "linear_attention")
_ATTENTION = ("attention", "full_attention")


def mamba2_shape(config: PretrainedConfig) -> Mamba2Shape:
    """The recurrent layers; the gated norm takes the channels of each group apart."""
    return Mamba2Shape(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        state_size=config.ssm_state_size,
        num_groups=config.n_groups,
        conv_kernel_size=config.conv_kernel,
        eps=config.layer_norm_epsilon,
        norm_groups=config.n_groups,
        conv_bias=config.use_conv_bias,
        proj_bias=config.use_bias,
        dt_limit=tuple(config.time_step_limit),
    )


def attention_shape(config: PretrainedConfig) -> SelfAttentionShape:
    """The attention layers, which know no positions."""
    return SelfAttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )


def mixture_shape(config: PretrainedConfig) -> MixtureShape:
    """DeepSeek-V3's routing, experts without gate, and a shared one of another size."""
    return MixtureShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_experts=config.n_routed_experts,
        rule=routing_rule(config),
        shared_intermediate_size=config.moe_shared_expert_intermediate_size,
        correction_bias=True,
        hidden_act=config.mlp_hidden_act,
        gated=False,
        wide_router=True,
        latent_size=config.moe_latent_size or 0,
    )


class NemotronHDecoderLayer(DecoderLayer):
    """One mixer behind a norm: which one, `layers_block_type` says."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        kind = config.layers_block_type[extract_layer_index(prefix)]
        self.mixer = _new_mixer(kind, vllm_config, f"{prefix}.mixer")

    def forward(self, positions: Tensor, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        mixer = self.mixer
        if isinstance(mixer, SelfAttention):
            return mixer.after_norm(self.norm, positions, stream)
        if isinstance(mixer, UngatedMLP | MixtureOfExperts):
            return mixer.after_norm(self.norm, stream)
        normed, total = self.norm.enter(stream)
        return ResidualStream(total, mixer(normed)), total


def _new_mixer(kind: str, vllm_config: VllmConfig, prefix: str) -> nn.Module:
    model_config = vllm_config.model_config
    config, quant_config = model_config.hf_text_config, vllm_config.quant_config
    if kind in _MAMBA:
        only_silu(config.mamba_hidden_act, prefix)
        return Mamba2(mamba2_shape(config), prefix, quant_config=quant_config)
    if kind in _ATTENTION:
        rope = no_rope(config.head_dim, model_config.max_model_len)
        return SelfAttention(attention_shape(config), rope, prefix, quant_config)
    if kind == "mlp":
        return UngatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.mlp_hidden_act,
            bias=config.mlp_bias,
            prefix=prefix,
            quant_config=quant_config,
        )
    if kind == "moe":
        if config.mlp_bias:
            raise VLLMValidationError(f"{prefix}: experts with biases are not supported")
        return MixtureOfExperts(mixture_shape(config), prefix, quant_config)
    raise VLLMValidationError(f"{prefix} has type {kind!r}; supported: mamba, attention, mlp, moe")


class NemotronHForCausalLM(HybridForCausalLM):
    """`NemotronHForCausalLM` checkpoints: `hybrid_override_pattern` or `layers_block_type`."""

    fused_names = (*HybridForCausalLM.fused_names, *Router.CHECKPOINT_NAMES)
    stacked_names = Experts.UNGATED_CHECKPOINT_NAMES
    weights_mapper = WeightsMapper(
        orig_to_new_substr={".mixer.shared_experts.": ".mixer.shared_expert."},
        orig_to_new_prefix={
            "backbone.embeddings.": "model.embed_tokens.",
            "backbone.norm_f.": "model.norm.",
            "backbone.": "model.",
        },
    )
    unused_weights = {"mtp.": "no speculative method of this engine drafts with this head"}
    recurrent_shape = staticmethod(mamba2_shape)

    def _init_model(
        self,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] | None = None,
    ) -> DecoderModel:
        config = vllm_config.model_config.hf_text_config
        make_layer = partial(layer_type or NemotronHDecoderLayer, vllm_config)
        return DecoderModel(config, make_layer, RMSNorm, prefix, eps=config.layer_norm_epsilon)
