# SPDX-License-Identifier: Apache-2.0
"""Small helpers of the model files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.weights import AutoWeightsLoader, WeightsError, WeightsMapper
from vllm.sequence import IntermediateTensors

__all__ = [
    "AutoWeightsLoader",
    "WeightsError",
    "WeightsMapper",
    "extract_layer_index",
    "make_empty_intermediate_tensors_factory",
    "make_layers",
    "maybe_prefix",
]


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


def make_layers(
    num_hidden_layers: int, layer_fn: LayerFactory, prefix: str
) -> tuple[int, int, nn.ModuleList]:
    """This pipeline stage's layers `[start, end)`, built by `layer_fn(prefix=...)`."""
    group = get_pp_group()
    start, end = get_pp_indices(num_hidden_layers, group.rank_in_group, group.world_size)
    layers = nn.ModuleList([layer_fn(prefix=f"{prefix}.{i}") for i in range(start, end)])
    return start, end, layers


def make_empty_intermediate_tensors_factory(
    keys: Sequence[str], hidden_size: int
) -> Callable[[int, torch.dtype, torch.device], IntermediateTensors]:
    """A function `(batch_size, dtype, device)` giving zeros `[batch_size, hidden_size]` per key."""

    def make(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        return IntermediateTensors(
            {key: torch.zeros(batch_size, hidden_size, dtype=dtype, device=device) for key in keys}
        )

    return make
