# SPDX-License-Identifier: Apache-2.0
"""Small helpers of the model files."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PretrainedConfig

from vllm.config import VllmConfig
from vllm.config.current import get_current_vllm_config
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.pipeline_partition import choose_partition
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layer_errors import naming_layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mlp import GatedMLP
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllm.model_executor.models.weights import AutoWeightsLoader as AutoWeightsLoader
from vllm.model_executor.models.weights import WeightsError as WeightsError
from vllm.model_executor.models.weights import WeightsMapper as WeightsMapper
from vllm.sequence import IntermediateTensors


class LayerFactory(Protocol):
    """Builds one layer from its name."""

    def __call__(self, prefix: str) -> nn.Module: ...


def maybe_prefix(prefix: str, name: str) -> str:
    """`prefix.name`, or `name` without a prefix."""
    return f"{prefix}.{name}" if prefix else name


def extract_layer_index(layer_name: str) -> int:
    """The one number in a dotted layer name; raises ValueError without exactly one."""
    numbers = [int(part) for part in layer_name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ValueError(f"layer name {layer_name!r} must contain exactly one number")
    return numbers[0]


def head_dim(config: PretrainedConfig) -> int:
    """Elements of an attention head; configs of some families leave them out."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def serves_only(config: PretrainedConfig, **served: Any) -> None:
    """Raises VLLMValidationError for a field that the config has with another value than this."""
    given = config.to_dict()
    for name, value in served.items():
        found = given.get(name)
        if found is not None and found != value:
            raise VLLMValidationError(
                f"{name} {found!r} is not supported; supported: {value!r}", "model"
            )


def refuse_partial(rope: Mapping[str, Any]) -> None:
    """Raises VLLMValidationError for a rotation of a part of each head: in transformers some
    families turn such a part, and others all of the head."""
    part = rope.get("partial_rotary_factor")
    if part not in (None, 1.0):
        raise VLLMValidationError(
            f"partial_rotary_factor {part} is not supported by this family; supported: 1.0", "model"
        )


def rotary(
    vllm_config: VllmConfig, head_dim: int, *, may_be_partial: bool = False
) -> RotaryEmbedding:
    """The rotation of heads of `head_dim`, of families where all layers have one.

    Raises VLLMValidationError for one of a part of each head, unless it `may_be_partial`.
    """
    model = vllm_config.model_config
    rope = model.hf_text_config.rope_parameters or {}
    if not may_be_partial:
        refuse_partial(rope)
    return get_rope(head_dim, model.max_model_len, rope_parameters=rope)


def gated_mlp(vllm_config: VllmConfig, prefix: str, *, bias: bool = False) -> GatedMLP:
    """The dense feed-forward network, where the config has its sizes under the usual names."""
    config = vllm_config.model_config.hf_text_config
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        config.hidden_act,
        bias=bias,
        prefix=prefix,
        quant_config=vllm_config.quant_config,
    )


def sliding_window(config: PretrainedConfig, layer_index: int) -> int | None:
    """A layer's window, None of one with full attention; VLLMValidationError for another layer
    type, and for one that slides by no window."""
    kind = config.layer_types[layer_index]
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    if kind not in windows:
        raise VLLMValidationError(
            f"layer {layer_index} has type {kind!r}; supported: {sorted(windows)}", "model"
        )
    if kind == "sliding_attention" and windows[kind] is None:
        raise VLLMValidationError(
            f"layer {layer_index} is of type {kind!r}, but sliding_window of the config is None; "
            "give the window, or the type 'full_attention'",
            "model",
        )
    return windows[kind]


class MissingLayer(nn.Module):
    """Stands where another pipeline stage has a module, so that names are those of the whole
    model."""


def make_layers(
    num_hidden_layers: int, layer_fn: LayerFactory, prefix: str
) -> tuple[int, int, nn.ModuleList]:
    """All layers `0 .. num_hidden_layers - 1`, of which this pipeline stage has `[start, end)`,
    built by `layer_fn(prefix=...)`; the others are `MissingLayer`s. Returns start, end, layers.
    Errors name the layer that they come from."""
    stage = get_pp_group()
    start, end = 0, num_hidden_layers
    if stage.world_size > 1:
        counts = _partition(num_hidden_layers, layer_fn, prefix, stage.world_size)
        start = sum(counts[: stage.rank_in_group])
        end = start + counts[stage.rank_in_group]

    def build(index: int) -> nn.Module:
        with naming_layer(f"{prefix}.{index}"):
            return layer_fn(prefix=f"{prefix}.{index}")

    layers = nn.ModuleList(
        build(i) if start <= i < end else MissingLayer() for i in range(num_hidden_layers)
    )
    return start, end, layers


def _partition(num_layers: int, layer_fn: LayerFactory, prefix: str, num_stages: int) -> list[int]:
    """Layers of each stage, by bytes: those of a layer's parameters and of the state that it keeps
    of one request of full length, of the embedding on the first stage and of the head on the
    last."""
    config = get_current_vllm_config()
    model, batched = config.model_config, config.scheduler_config.max_num_batched_tokens

    def layer_bytes(index: int) -> int:
        with torch.device("meta"):
            layer = layer_fn(prefix=f"{prefix}.{index}")
        specs = [
            module.get_kv_cache_spec(config)
            for module in layer.modules()
            if isinstance(module, AttentionLayerBase)
        ]
        state = sum(
            spec.blocks_per_request(batched, model.max_model_len) * spec.page_size_bytes
            for spec in specs
        )
        return state + sum(param.nbytes for param in layer.parameters())

    rows = model.get_vocab_size() // get_tensor_model_parallel_world_size()
    vocabulary = rows * model.get_hidden_size() * model.dtype.itemsize
    costs = [layer_bytes(index) for index in range(num_layers)]
    return choose_partition(costs, num_stages, first=vocabulary, last=vocabulary)


def make_empty_intermediate_tensors_factory(
    keys: Sequence[str], hidden_size: int
) -> Callable[[int, torch.dtype, torch.device], IntermediateTensors]:
    """A function `(batch_size, dtype, device)` giving zeros `[batch_size, hidden_size]` per key."""

    def make(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        return IntermediateTensors(
            {key: torch.zeros(batch_size, hidden_size, dtype=dtype, device=device) for key in keys}
        )

    return make
