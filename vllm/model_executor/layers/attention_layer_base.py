# SPDX-License-Identifier: Apache-2.0
"""What every layer that keeps state offers the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheSpec


class AttentionLayerBase(ABC):
    """A layer with state: says what it keeps and how its metadata is built.

    The engine collects these layers from `static_forward_context`, groups them by spec, allocates
    memory and binds each one's view to `kv_cache` before the first forward.
    """

    layer_name: str
    kv_cache: Any

    def register(self, layer_name: str) -> None:
        """Enter the engine's table of layers; raises ValueError for a name used twice."""
        self.layer_name = layer_name
        self.kv_cache = None
        table = get_current_vllm_config().compilation_config.static_forward_context
        if layer_name in table:
            raise ValueError(f"two layers with state are named {layer_name!r}")
        table[layer_name] = self

    def metadata(self) -> Any:
        """This layer's batch metadata in the running step."""
        return get_forward_context().attn_metadata[self.layer_name]

    @abstractmethod
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """What the layer keeps."""

    @abstractmethod
    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend whose metadata the layer reads."""
