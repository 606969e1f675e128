# SPDX-License-Identifier: Apache-2.0
"""What connectors that move whole blocks of the arena have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheConfig


class ArenaConnector(KVConnectorBase_V1, SupportsHMA):
    """Blocks come and go beside the steps, so that the calls around layers do nothing. Blocks that
    came damaged are put into `_load_errors`, as `(state group, block)`.

    ValueError without `kv_cache_config`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if kv_cache_config is None:
            raise ValueError(f"{type(self).__name__} needs kv_cache_config")
        self._config = kv_cache_config
        self._num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._load_errors: set[tuple[int, int]] = set()

    @property
    def takes_arena(self) -> bool:
        return True

    @classmethod
    def acts_on_every_layer(cls, extra_config: dict[str, Any]) -> bool:
        return False

    @classmethod
    def reads_recurrent_state(cls, extra_config: dict[str, Any]) -> bool:
        """It copies checkpoints and the states of requests that ended, which are complete."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads run beside the steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Whole blocks leave at the beginning of a later step."""

    def wait_for_save(self) -> None:
        """Nothing of this step is read during it."""

    def get_blocks_with_load_errors(self) -> set[tuple[int, int]]:
        errors, self._load_errors = self._load_errors, set()
        return errors
