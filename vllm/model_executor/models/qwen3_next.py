# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: Qwen3.5's mixers with other projection names, experts or gated MLPs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.kernels.fp8 import GROUP
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
from vllm.model_executor.models.weights import WeightsError


def mixture_shape(config: PretrainedConfig) -> MixtureShape:
    """Top-k of a softmax, and a gated shared expert."""
    return replace(
        qwen3_moe.mixture_shape(config),
        shared_intermediate_size=config.shared_expert_intermediate_size,
        shared_gate=True,
    )


#: of a linear layer: the weight, its scales, and one of its input, as checkpoints call them
_KINDS = ("weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale")
_UNGROUPED = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


def ungrouped(
    weights: Iterable[tuple[str, Tensor]], shape: GatedDeltaNetShape
) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint whose `in_proj_qkvz` and `in_proj_ba` are grouped by key head, named and ordered
    as in Qwen3.5: `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`.

    Per key head, rows are q, k, then v and z of its value heads; b and a of its value heads. Scales
    follow their rows, or blocks of rows; one for a whole matrix is one for each of its parts. A
    tensor of another number of rows passes as it is, to be reported with all that does not fit.
    Raises WeightsError for blocks that would be cut.
    """
    heads = shape.num_k_heads
    values = shape.num_v_heads // heads
    sizes = {
        "in_proj_qkvz": [shape.head_k_dim] * 2 + [values * shape.head_v_dim] * 2,
        "in_proj_ba": [values, values],
    }
    for name, tensor in weights:
        layer, _, kind = name.rpartition(".")
        mixer, _, module = layer.rpartition(".")
        whole = module in sizes and kind in _KINDS
        parts = _parts(name, tensor, sizes[module], heads) if whole else None
        if parts is None:
            yield name, tensor
        else:
            named = zip(_UNGROUPED[module], parts, strict=True)
            yield from ((f"{mixer}.{part}.{kind}", rows) for part, rows in named)


def _parts(
    name: str, tensor: Tensor, sizes: Sequence[int], heads: int
) -> tuple[Tensor, Tensor] | None:
    """All but the last of the matrices whose rows are grouped by head, `sizes` of each in a group,
    and the last one; None where the tensor has neither a row, a block nor one element of them."""
    rows = heads * sum(sizes)
    if tensor.numel() == 1:
        return tensor, tensor
    by_blocks = len(tensor) == -(-rows // GROUP) != rows
    if not by_blocks and len(tensor) != rows:
        return None
    by_row = tensor.repeat_interleave(GROUP, 0)[:rows] if by_blocks else tensor
    by_head = by_row.unflatten(0, (heads, -1)).split(list(sizes), dim=1)
    *others, last = (part.flatten(0, 1) for part in by_head)
    first = torch.cat(others)
    return (_blocks(name, first), _blocks(name, last)) if by_blocks else (first, last)


def _blocks(name: str, by_row: Tensor) -> Tensor:
    """The scales of blocks, each given for all of the block's rows; WeightsError where they
    differ."""
    blocks = by_row[::GROUP]
    if not torch.equal(blocks.repeat_interleave(GROUP, 0)[: len(by_row)], by_row):
        raise WeightsError(
            [
                f"{name}: a block of {GROUP} rows has those of several heads; supported: heads of "
                f"multiples of {GROUP} rows, or one scale per row or matrix"
            ]
        )
    return blocks


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
