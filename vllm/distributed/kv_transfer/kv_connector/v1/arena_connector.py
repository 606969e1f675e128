# SPDX-License-Identifier: Apache-2.0
"""What connectors that move whole blocks of the arena have in common."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig

#: group, block on the device, block in the host's memory
Place = tuple[int, int, int]


def runs(places: Iterable[Place]) -> Iterator[tuple[int, int, int, int]]:
    """Group, first device block, first host block and count of blocks that follow one another in
    both memories."""
    first: Place | None = None
    count = 0
    for group, device, host in sorted(places):
        if first is not None and (group, device, host) == (
            first[0],
            first[1] + count,
            first[2] + count,
        ):
            count += 1
            continue
        if first is not None:
            yield (*first, count)
        first, count = (group, device, host), 1
    if first is not None:
        yield (*first, count)


class ConnectorBesideSteps(KVConnectorBase_V1, SupportsHMA):
    """State comes and goes beside the steps, so that the calls around layers do nothing.

    It reads checkpoints and the states of requests that ended, which are complete.
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

    @classmethod
    def acts_on_every_layer(cls, extra_config: dict[str, Any]) -> bool:
        return False

    @classmethod
    def reads_recurrent_state(cls, extra_config: dict[str, Any]) -> bool:
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads run beside the steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """State leaves in a later step, or when its request has ended."""

    def wait_for_save(self) -> None:
        """Nothing of this step is read during it."""


class ArenaConnector(ConnectorBesideSteps):
    """Moves whole blocks of the arena. Blocks that came damaged are put into `_load_errors`, as
    `(state group, block)`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._load_errors: set[tuple[int, int]] = set()

    @property
    def takes_arena(self) -> bool:
        return True

    def get_blocks_with_load_errors(self) -> set[tuple[int, int]]:
        errors, self._load_errors = self._load_errors, set()
        return errors
