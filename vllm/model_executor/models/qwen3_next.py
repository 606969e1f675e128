# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: Qwen3.5's mixers with other projection names, experts or gated MLPs."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.model_executor.layers.gated_delta_net import GatedDeltaNetShape
from vllm.model_executor.layers.mixture_shape import MixtureShape
from vllm.model_executor.layers.moe import Experts, MixtureOfExperts
from vllm.model_executor.layers.router import Router
from vllm.model_executor.models import qwen3_moe
from vllm.model_executor.models.decoder import FeedForward
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    delta_net_shape,
)
from vllm.model_executor.models.utils import extract_layer_index, gated_mlp


def mixture_shape(config: PretrainedConfig) -> MixtureShape:
    """Top-k of a softmax, and a gated shared expert."""
    return replace(
        qwen3_moe.mixture_shape(config),
        shared_intermediate_size=config.shared_expert_intermediate_size,
        shared_gate=True,
    )


def ungrouped(
    weights: Iterable[tuple[str, Tensor]], shape: GatedDeltaNetShape
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint whose `in_proj_qkvz` and `in_proj_ba` are grouped by key head, named and ordered
    as in Qwen3.5: `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`.

    Per key head, rows are q, k, then v and z of its value heads; b and a of its value heads. A
    tensor of another number of rows passes as it is, to be reported with all that does not fit.
    """
    heads = shape.num_k_heads
    values = shape.num_v_heads // heads
    sizes = [shape.head_k_dim] * 2 + [values * shape.head_v_dim] * 2
    for name, tensor in weights:
        layer, _, module = name.removesuffix(".weight").rpartition(".")
        if module == "in_proj_qkvz" and len(tensor) == heads * sum(sizes):
            by_head = tensor.unflatten(0, (heads, -1)).split(sizes, dim=1)
            q, k, v, z = (part.flatten(0, 1) for part in by_head)
            yield f"{layer}.in_proj_qkv.weight", torch.cat([q, k, v])
            yield f"{layer}.in_proj_z.weight", z
        elif module == "in_proj_ba" and len(tensor) == 2 * shape.num_v_heads:
            b, a = tensor.unflatten(0, (heads, -1)).split(values, dim=1)
            yield f"{layer}.in_proj_b.weight", b.flatten(0, 1)
            yield f"{layer}.in_proj_a.weight", a.flatten(0, 1)
        else:
            yield name, tensor


class Qwen3NextDecoderLayer(Qwen3_5DecoderLayer):
    """Gated delta net or gated attention, then experts or a gated MLP."""

    def make_mlp(self, vllm_config: VllmConfig, prefix: str) -> FeedForward:
        config = vllm_config.model_config.hf_text_config
        if qwen3_moe.is_sparse(config, extract_layer_index(prefix)):
            return MixtureOfExperts(mixture_shape(config), prefix, vllm_config.quant_config)
        return gated_mlp(vllm_config, prefix)


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    """`Qwen3NextForCausalLM` checkpoints, experts one by one or stacked."""

    layer_class = Qwen3NextDecoderLayer
    fused_names = (*Qwen3_5ForCausalLM.fused_names, *Router.GATED_CHECKPOINT_NAMES)
    stacked_names = Experts.CHECKPOINT_NAMES
    unused_weights = {"mtp.": "no speculative method of this engine drafts with a mixture's head"}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(ungrouped(weights, delta_net_shape(self.config)))
