# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 (arXiv 2503.19786), text: norms around every branch, five sliding layers to a full one.

Embeddings are multiplied by the root of their width. Sliding and full layers have rotations of
their own.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.config.current import get_current_vllm_config
from vllm.exceptions import VLLMValidationError
from vllm.kernels.residual_stream import ResidualStream
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.self_attention import SelfAttention, SelfAttentionShape
from vllm.model_executor.models import llama
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.model_executor.models.decoder import DecoderLayer, DecoderModel
from vllm.model_executor.models.utils import (
    LayerFactory,
    extract_layer_index,
    refuse_partial,
    sliding_window,
)
from vllm.model_executor.models.weights import WeightsMapper


def attention_shape(config: PretrainedConfig, layer_index: int) -> SelfAttentionShape:
    """The attention of one layer; `layer_types` says which layers slide."""
    return replace(
        llama.attention_shape(config),
        eps=config.rms_norm_eps,
        qk_norm=GemmaRMSNorm,
        sliding_window=sliding_window(config, layer_index),
        scale=config.query_pre_attn_scalar**-0.5,
    )


def check(config: PretrainedConfig) -> None:
    """Raises VLLMValidationError for what relatives of the family have and this does not serve."""
    kinds = {"sliding_attention", "full_attention"}
    unknown = sorted(set(config.layer_types) - kinds)
    problems = {
        f"layers of type {unknown}": bool(unknown),
        "attn_logit_softcapping": config.attn_logit_softcapping is not None,
        "final_logit_softcapping": config.final_logit_softcapping is not None,
        "use_bidirectional_attention": bool(config.use_bidirectional_attention),
    }
    for what, given in problems.items():
        if given:
            raise VLLMValidationError(
                f"{what} is not supported; supported: causal Gemma 3 of {sorted(kinds)} layers "
                "without soft caps",
                "model",
            )


class Gemma3DecoderLayer(DecoderLayer):
    """Attention and a gated MLP, each between two norms; all norms scale by 1 + weight."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        quant_config = vllm_config.quant_config
        index = extract_layer_index(prefix)
        max_model_len = vllm_config.model_config.max_model_len
        parameters = config.rope_parameters[config.layer_types[index]]
        refuse_partial(parameters)
        rope = get_rope(config.head_dim, max_model_len, rope_parameters=parameters)
        norm = partial(GemmaRMSNorm, config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = norm()
        shape = attention_shape(config, index)
        self.self_attn = SelfAttention(shape, rope, f"{prefix}.self_attn", quant_config)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_activation,
            prefix=f"{prefix}.mlp",
            quant_config=quant_config,
        )
        self.post_feedforward_layernorm = norm()

    def forward(self, positions: Tensor, stream: ResidualStream) -> tuple[ResidualStream, Tensor]:
        normed, total = self.input_layernorm.enter(stream)
        mixed = self.post_attention_layernorm.normalise(self.self_attn(positions, normed))
        normed, middle = self.pre_feedforward_layernorm.enter(ResidualStream(total, mixed))
        fed = self.post_feedforward_layernorm.normalise(self.mlp(normed))
        return ResidualStream(middle, fed), total


class Gemma3Model(DecoderModel):
    """Gemma 3's text decoder without the output head."""

    def __init__(
        self, config: PretrainedConfig, layer_fn: LayerFactory, norm: type[RMSNorm], prefix: str
    ) -> None:
        check(config)
        super().__init__(config, layer_fn, norm, prefix)
        dtype = get_current_vllm_config().model_config.dtype
        #: rounded like a weight, as the model was trained
        self.embed_scale = rounded(math.sqrt(config.hidden_size), dtype)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return super().embed_input_ids(input_ids) * self.embed_scale


def rounded(value: float, dtype: torch.dtype) -> float:
    """The number of `dtype` next to `value`."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Text checkpoints."""

    layer_class = Gemma3DecoderLayer
    norm_class = GemmaRMSNorm
    model_class = Gemma3Model


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Multimodal checkpoints, served as text; their parts have had two orders of names."""

    weights_mapper = WeightsMapper(
        orig_to_new_prefix={
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
        }
    )
    unused_weights = {
        "vision_tower.": "only text is served",
        "multi_modal_projector.": "only text is served",
    }
