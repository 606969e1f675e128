# SPDX-License-Identifier: Apache-2.0
"""What all connectors of captured hidden states have in common."""

import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.arena_connector import ConnectorBesideSteps
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import RowCopier
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_saver import RowSaver
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.scheduling import RowsMetadata
from vllm.distributed.parallel_state import stores_hidden_states
from vllm.exceptions import VLLMValidationError
from vllm.forward_context import ForwardContext
from vllm.hidden_states_storage import RowFormat, StorageDtype, storage_dtype_of
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.request import Request


def storage_path(transfer: KVTransferConfig) -> str:
    """The files' directory, absolute."""
    return os.path.abspath(os.fspath(transfer.get_from_extra_config("shared_storage_path", "/tmp")))


def num_writer_threads(transfer: KVTransferConfig) -> int:
    """Files written at a time; ValueError below 1."""
    count = int(transfer.get_from_extra_config("num_writer_threads", 8))
    if count < 1:
        raise VLLMValidationError(f"num_writer_threads must be >= 1, got {count}")
    return count


def flag(transfer: KVTransferConfig, key: str, default: bool) -> bool:
    """ValueError for anything but true or false."""
    value = transfer.get_from_extra_config(key, default)
    if not isinstance(value, bool):
        raise VLLMValidationError(
            f"kv_connector_extra_config {key!r} must be true or false: {value!r}"
        )
    return value


#: part of the layer's name, for configurations that do not show its spec
LAYER_NAME_MARKER = "cache_only_layers"


@dataclass(frozen=True)
class HiddenStatesGroup:
    """`index` among the groups, the group's own `block_size`, and the layer in it.

    `layer_name` is None where the scheduler's view of the group does not single the layer out.
    `spec`: the layer's, or what that view shows of it.
    """

    index: int
    block_size: int
    layer_name: str | None
    spec: KVCacheSpec

    def row_format(self, storage: StorageDtype) -> RowFormat:
        """Of the layer's rows; ValueError where its spec is not shown."""
        if not self.spec.is_hidden_states:
            raise VLLMValidationError(
                f"state group {self.index} shows {self.spec.label}, not its captured hidden states"
            )
        [view] = self.spec.views
        _, columns, hidden = view.shape
        return RowFormat(columns, hidden, view.dtype, storage)


def find_hidden_states_group(kv_cache_config: KVCacheConfig) -> HiddenStatesGroup:
    """The group that holds captured hidden states, as the layers' specs say.

    A sole group is it whatever its spec says, since a scheduler may see only its first member.
    On a pipeline stage that does not hold the layer, the group has no name.
    ValueError when there is no such group or more than one.
    """
    groups = kv_cache_config.kv_cache_groups
    found: list[tuple[int, str | None]] = [
        (i, name)
        for i, group in enumerate(groups)
        for name, spec in group.layer_specs.items()
        if spec.is_hidden_states
    ]
    found += [
        (i, None)
        for i, group in enumerate(groups)
        if not group.layer_names and group.kv_cache_spec.is_hidden_states
    ]
    if len(found) == 1:
        index, name = found[0]
        spec = groups[index].kv_cache_spec
        layer_spec = spec if name is None else spec.of_layer(name)
        return HiddenStatesGroup(index, spec.block_size, name, layer_spec)
    if not found and len(groups) == 1:
        names = [n for n in groups[0].layer_names if LAYER_NAME_MARKER in n]
        layer_name = names[0] if len(names) == 1 else None
        spec = groups[0].kv_cache_spec
        return HiddenStatesGroup(0, spec.block_size, layer_name, spec)
    raise VLLMValidationError(
        f"expected one layer of captured hidden states in {len(groups)} state group(s), found "
        f"{len(found)}; extraction needs speculative_config.method extract_hidden_states"
    )


SaverT = TypeVar("SaverT", bound=RowSaver)


class HiddenStatesConnector(ConnectorBesideSteps, Generic[SaverT]):
    """Store-only: rows stay in the cache until their request has ended and are then copied out.

    A subclass says where to (`_make_saver`), and when (`request_finished`, which appends to
    `_pending`). Setting of all of them (`kv_connector_extra_config`):

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
            raise VLLMValidationError(
                f"{name} needs speculative_config.method 'extract_hidden_states'"
            )
        self._group = find_hidden_states_group(self._config)
        self._storage = storage_dtype_of(self._kv_transfer_config.kv_connector_extra_config)
        self._saver: SaverT | None = None
        self._copier: RowCopier | None = None
        #: scheduler side: requests that ended, for the next step's message
        self._pending: list[Any] = []

    @classmethod
    def supports_pipeline_stages(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """The last stage has all captured streams."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "NHD"

    @property
    def can_leave_memory(self) -> bool:
        return True

    def leave_memory(self, kv_cache_config: KVCacheConfig) -> None:
        self._config = kv_cache_config
        self._group = find_hidden_states_group(kv_cache_config)
        if self._copier is not None:
            self._copier.leave()

    # ---- worker side ---------------------------------------------------------------------------

    @abstractmethod
    def _make_saver(self, copier: RowCopier) -> SaverT:
        """Called once, on the rank that stores."""

    @property
    def _layer_ids(self) -> list[int]:
        """Ids of the rows' columns, in their order."""
        speculative = self._vllm_config.speculative_config
        assert speculative is not None
        return sorted(speculative.extraction_layer_ids)

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        if not stores_hidden_states():
            return
        cache = self._own_cache(kv_caches)
        if self._copier is not None:
            self._copier.use(cache)
            return
        self._copier = RowCopier(cache, self._storage)
        self._saver = self._make_saver(self._copier)

    def _own_cache(self, kv_caches: dict[str, Tensor]) -> Tensor:
        """The rows' cache, `(num_blocks, block_size, columns, hidden)`."""
        name = self._group.layer_name
        if name is None:
            [name] = [n for n in kv_caches if LAYER_NAME_MARKER in n]
        cache = kv_caches[name]
        if cache.dim() != 4 or cache.shape[1] != self._group.block_size:
            raise VLLMValidationError(
                f"cache of {name} has shape {tuple(cache.shape)}, expected (num_blocks, "
                f"{self._group.block_size}, columns, hidden)"
            )
        return cache

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Store-only."""

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
            self._saver = self._copier = None

    # ---- scheduler side ------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert num_external_tokens == 0, "this connector loads nothing"

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> RowsMetadata:
        pending, self._pending = self._pending, []
        return RowsMetadata(pending)

    def has_pending_push_work(self) -> bool:
        return bool(self._pending)

    def _missing_rows(
        self, request: Request, token_ids: list[int], block_ids: list[int]
    ) -> str | None:
        """What is wrong if the slots of its blocks do not hold a row of each token."""
        num_rows = min(request.num_computed_tokens, len(block_ids) * self._group.block_size)
        if num_rows < len(token_ids):
            return f"{num_rows} rows of hidden states for {len(token_ids)} tokens"
        return None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self._group.index])
