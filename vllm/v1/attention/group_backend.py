# SPDX-License-Identifier: Apache-2.0
"""The backend of a state group: its layers read one metadata object, so it is one for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layer_errors import naming_layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.interface_check import check_backend


def group_backend(
    layer_names: Sequence[str], layers: Mapping[str, AttentionLayerBase]
) -> type[AttentionBackend]:
    """VLLMValidationError for layers of several backends, and for a class that is none."""
    first, *others = layer_names
    with naming_layer(first):
        backend = layers[first].get_attn_backend()
        check_backend(backend)
    for name in others:
        other = layers[name].get_attn_backend()
        if other is not backend:
            raise VLLMValidationError(
                f"{first} and {name} keep the same, so they share blocks and metadata, but have "
                f"the attention backends {backend.name} and {other.name}; give both the same one"
            )
    return backend
