# SPDX-License-Identifier: Apache-2.0
"""What all connectors of captured hidden states have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.group import (
    LAYER_NAME_MARKER,
    find_hidden_states_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.metadata import RowsMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import RowCopier
from vllm.distributed.parallel_state import stores_hidden_states
from vllm.hidden_states_storage import storage_dtype_of

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class Saver(Protocol):
    """The worker side: takes rows out of the cache and hands them on."""

    def step(self, saves: Any, finished_req_ids: set[str]) -> set[str]:
        """Take the step's saves; returns the requests whose blocks are not needed any more."""
        ...

    def shutdown(self) -> None: ...


SaverT = TypeVar("SaverT", bound=Saver)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA, Generic[SaverT]):
    """Store-only: rows stay in the cache until their request has ended and are then copied out.

    A subclass says where to (`_make_saver`), and when (`request_finished`, and a `RowsMetadata` of
    `build_connector_meta`). Setting of all of them (`kv_connector_extra_config`):

    - `storage_dtype` (`auto`): `auto`, rows as the model computes them, or `fp8_e4m3`
      (`vllm.hidden_states_storage`).

    Raises ValueError without extraction or for another `storage_dtype`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        name = type(self).__name__
        speculative = vllm_config.speculative_config
        if speculative is None or not speculative.uses_extract_hidden_states():
            raise ValueError(f"{name} needs speculative_config.method 'extract_hidden_states'")
        if kv_cache_config is None:
            raise ValueError(f"{name} needs kv_cache_config")
        self._group = find_hidden_states_group(kv_cache_config)
        self._storage = storage_dtype_of(self._kv_transfer_config.kv_connector_extra_config)
        self._saver: SaverT | None = None

    @classmethod
    def acts_on_every_layer(cls, extra_config: dict[str, Any]) -> bool:
        return False

    @classmethod
    def reads_recurrent_state(cls, extra_config: dict[str, Any]) -> bool:
        return False

    @classmethod
    def supports_pipeline_stages(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """The last stage has all captured streams."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "NHD"

    # ---- worker side ---------------------------------------------------------------------------

    @abstractmethod
    def _make_saver(self, copier: RowCopier) -> SaverT:
        """Called once, on the rank that stores."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        if stores_hidden_states():
            self._saver = self._make_saver(RowCopier(self._own_cache(kv_caches), self._storage))

    def _own_cache(self, kv_caches: dict[str, Tensor]) -> Tensor:
        """The rows' cache, `(num_blocks, block_size, columns, hidden)`."""
        name = self._group.layer_name
        if name is None:
            [name] = [n for n in kv_caches if LAYER_NAME_MARKER in n]
        cache = kv_caches[name]
        if cache.dim() != 4 or cache.shape[1] != self._group.block_size:
            raise ValueError(
                f"cache of {name} has shape {tuple(cache.shape)}, expected (num_blocks, "
                f"{self._group.block_size}, columns, hidden)"
            )
        return cache

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Store-only."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Store-only."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Rows stay in the cache until their request has finished."""

    def wait_for_save(self) -> None:
        """Nothing of this step is read during it."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RowsMetadata)
        saves = metadata.pending_saves
        if self._saver is None:
            # Another rank writes; this one only confirms that it will not touch the blocks.
            return {save.req_id for save in saves} or None, None
        return self._saver.step(saves, finished_req_ids) or None, None

    def shutdown(self) -> None:
        if self._saver is not None:
            self._saver.shutdown()
            self._saver = None

    # ---- scheduler side ------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert num_external_tokens == 0, "this connector loads nothing"

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self._group.index])
