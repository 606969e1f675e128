# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 (arXiv 2405.04434): the layers of V3, experts chosen by a softmax."""

from transformers import PretrainedConfig

from vllm.exceptions import VLLMValidationError
from vllm.kernels.moe import RoutingRule
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.models.deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
)
from vllm.model_executor.models.utils import serves_only

#: `topk_method` -> whether experts are chosen in the best groups only
_METHODS = {"greedy": False, "group_limited_greedy": True}


class DeepseekV2DecoderLayer(DeepseekV3DecoderLayer):
    """Latent attention, then a gated MLP or experts, whose weights are scores times a factor."""

    @staticmethod
    def is_interleaved(config: PretrainedConfig) -> bool:
        return True

    @staticmethod
    def mixture(config: PretrainedConfig, prefix: str) -> MixtureShape:
        serves_only(config, scoring_func="softmax", moe_layer_freq=1, norm_topk_prob=False)
        if config.topk_method not in _METHODS:
            raise VLLMValidationError(
                f"{prefix}: topk_method {config.topk_method!r} is not supported; supported: "
                f"{', '.join(_METHODS)}"
            )
        grouped = _METHODS[config.topk_method]
        return MixtureShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            num_experts=config.n_routed_experts,
            rule=RoutingRule(
                config.num_experts_per_tok,
                renormalize=False,
                num_groups=config.n_group if grouped else 1,
                top_groups=config.topk_group if grouped else 1,
                scale=config.routed_scaling_factor,
            ),
            shared_intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
            hidden_act=config.hidden_act,
            wide_router=True,
        )


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """`DeepseekV2ForCausalLM` checkpoints, experts one by one."""

    layer_class = DeepseekV2DecoderLayer
