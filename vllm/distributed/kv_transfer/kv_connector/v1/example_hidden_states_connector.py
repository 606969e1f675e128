# SPDX-License-Identifier: Apache-2.0
"""Stores captured hidden states, one safetensors file per request.

Needs `speculative_config.method = "extract_hidden_states"`. The reply of a request carries
`kv_transfer_params = {"hidden_states_path": path}`; the file holds `hidden_states
[n, columns, hidden]` (model dtype) and `token_ids [n]` (int64). It is complete once the lock
`<path>.lock` is free. Guide: docs/extraction.md.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import file_lock
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.group import (
    LAYER_NAME_MARKER,
    find_hidden_states_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.metadata import (
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.paths import check_params
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import (
    CopyEvent,
    RowCopier,
    extract_from_kv_cache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.saving import (
    HiddenStatesSaver,
    write_file,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.scheduling import (
    ExtractionScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.space_reservation import (
    choose_reservation,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.spool import remove_leftovers
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.storage import Storage
from vllm.distributed.parallel_state import stores_hidden_states

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import RequestError
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = [
    "ExampleHiddenStatesConnector",
    "ExampleHiddenStatesConnectorMetadata",
    "PendingSave",
    "cleanup_hidden_states",
    "extract_from_kv_cache",
    "load_hidden_states",
]


def load_hidden_states(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """`hidden_states [n, columns, hidden]` and `token_ids [n]`, as soon as they are complete.

    FileNotFoundError when there is no lock file, or when the server could not write the data.
    """
    filename = os.fspath(path)
    with file_lock.reading(filename):
        if not os.path.exists(filename):
            raise FileNotFoundError(f"the server has not written {filename}; its log says why")
        return load_file(filename)


def cleanup_hidden_states(path: str | os.PathLike[str], keep_hidden_states: bool = False) -> None:
    """Remove a request's lock file and, unless they are to be kept, its hidden states."""
    filename = os.fspath(path)
    for name in [file_lock.lock_path(filename)] + ([] if keep_hidden_states else [filename]):
        if os.path.exists(name):
            os.unlink(name)


def _storage_path(transfer: KVTransferConfig) -> str:
    return os.path.abspath(os.fspath(transfer.get_from_extra_config("shared_storage_path", "/tmp")))


def _flag(transfer: KVTransferConfig, key: str, default: bool) -> bool:
    value = transfer.get_from_extra_config(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"kv_connector_extra_config {key!r} must be true or false: {value!r}")
    return value


class ExampleHiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only. Settings (`kv_connector_extra_config`):

    - `shared_storage_path` (`/tmp`): directory of the files, made on demand;
    - `num_writer_threads` (8): files written at a time;
    - `use_synchronization_lock` (true): make and hold lock files;
    - `allow_custom_save_path` (false): honour a request's `hidden_states_path` below the directory.

    Raises ValueError without extraction or for settings of a wrong type.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states":
            raise ValueError(
                "ExampleHiddenStatesConnector needs speculative_config.method "
                "'extract_hidden_states'"
            )
        if kv_cache_config is None:
            raise ValueError("ExampleHiddenStatesConnector needs kv_cache_config")
        self._group = find_hidden_states_group(kv_cache_config)
        transfer = self._kv_transfer_config
        self._storage_path = _storage_path(transfer)
        self._scheduling = ExtractionScheduler(
            self._storage_path,
            _flag(transfer, "allow_custom_save_path", False),
            self._group.block_size,
        )
        self._use_lock = _flag(transfer, "use_synchronization_lock", True)
        self._num_writer_threads = int(transfer.get_from_extra_config("num_writer_threads", 8))
        if self._num_writer_threads < 1:
            raise ValueError(f"num_writer_threads must be >= 1, got {self._num_writer_threads}")
        self._saver: HiddenStatesSaver | None = None

    @classmethod
    def acts_on_every_layer(cls, extra_config: dict[str, Any]) -> bool:
        return False

    @classmethod
    def reads_recurrent_state(cls, extra_config: dict[str, Any]) -> bool:
        return False

    @classmethod
    def check_request(
        cls, kv_transfer_config: KVTransferConfig, params: dict[str, Any], num_completions: int
    ) -> None:
        allow_custom_path = _flag(kv_transfer_config, "allow_custom_save_path", False)
        check_params(_storage_path(kv_transfer_config), allow_custom_path, params, num_completions)

    @classmethod
    def supports_pipeline_stages(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """The last stage has all captured streams."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "NHD"

    # ---- worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        if not stores_hidden_states():
            return
        cache = self._own_cache(kv_caches)
        remove_leftovers(self._storage_path)
        self._saver = HiddenStatesSaver(
            RowCopier(cache),
            self._write_tensors,
            Storage(self._storage_path, self._use_lock),
            num_writer_threads=self._num_writer_threads,
            reserve_space=choose_reservation(self._storage_path),
        )

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
        """Take the locks of the requests that were scheduled for the first time."""
        if self._saver is not None:
            self._saver.open_new(self._metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        pending = self._metadata().pending_saves
        if self._saver is None:
            # Another rank writes; this one only confirms that it will not touch the blocks.
            return {save.req_id for save in pending} or None, None
        return self._saver.step(pending, finished_req_ids) or None, None

    def take_failed_requests(self) -> dict[str, RequestError]:
        return {} if self._saver is None else self._saver.take_failed()

    def shutdown(self) -> None:
        if self._saver is not None:
            self._saver.shutdown()
            self._saver = None

    def _metadata(self) -> ExampleHiddenStatesConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleHiddenStatesConnectorMetadata)
        return metadata

    @staticmethod
    def _write_tensors(
        tensors: dict[str, Tensor], event: CopyEvent, filename: str, lock_fd: int | None
    ) -> None:
        """Runs on a writer thread; subclasses override it to store another encoding.

        Waits for `event`, writes `filename` and closes `lock_fd`. An exception fails the file.
        """
        write_file(tensors, event, filename, lock_fd)

    # ---- scheduler side ------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert num_external_tokens == 0, "this connector loads nothing"

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduling.build_meta(scheduler_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.request_finished(request, block_ids[self._group.index])

    def has_pending_push_work(self) -> bool:
        return self._scheduling.has_pending
