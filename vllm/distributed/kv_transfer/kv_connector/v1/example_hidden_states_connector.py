# SPDX-License-Identifier: Apache-2.0
"""Stores captured hidden states, one safetensors file per request.

Needs `speculative_config.method = "extract_hidden_states"`. The reply of a request carries
`kv_transfer_params = {"hidden_states_path": path}`; the file holds `hidden_states
[n, columns, hidden]` (model dtype) and `token_ids [n]` (int64). It is complete once the lock
`<path>.lock` is free. Guide: docs/extraction.md.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm import decisions
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.extra_config import ExtraConfig
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import file_lock
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.connector import (
    HiddenStatesConnector,
    flag,
    num_writer_threads,
    storage_path,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.paths import (
    PathRefused,
    check_params,
    custom_path,
    default_path,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import (
    CopyEvent,
    RowCopier,
    extract_from_kv_cache,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.saving import (
    HiddenStatesSaver,
    WriteTensors,
    write_file,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.scheduling import (
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
    end_with_error,
    ended_badly,
    tokens_to_save,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.spool import (
    Storage,
    remove_leftovers,
)
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states_storage import STORAGE_DTYPE_KEY, file_metadata, read_hidden_states
from vllm.logger import init_logger
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine import RequestError
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

logger = init_logger(__name__)

_PROBE_BYTES = 4 * 2**20
#: a step may spend this long on reserving 4 MiB (1 GiB/s)
_LIMIT_S = 0.004
_WHAT = "hidden-state file space"
_KEYS = (
    "shared_storage_path",
    "num_writer_threads",
    "use_synchronization_lock",
    "allow_custom_save_path",
    STORAGE_DTYPE_KEY,
)


def choose_reservation(directory: str) -> bool:
    """Whether files in `directory` can be given their space when a request starts: measured there.

    A full disk is then found while the request can still fail, before a reply promises a file.
    Where the file system has no such operation, the C library writes into every page instead, which
    is too slow for the step loop.
    """
    try:
        elapsed_s = min(_probe(directory) for _ in range(3))
    except OSError as error:
        decisions.record(
            _WHAT, "reserved at a request's start", f"not measured: {error.strerror or error}"
        )
        return True
    figure = f"reserving 4 MiB takes {elapsed_s * 1e3:.2f} ms in {directory}"
    if elapsed_s > _LIMIT_S:
        decisions.record(_WHAT, "allocated while writing", figure, "reserved at a request's start")
        return False
    decisions.record(_WHAT, "reserved at a request's start", figure)
    return True


def _probe(directory: str) -> float:
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        start = time.perf_counter()
        os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
        return time.perf_counter() - start


__all__ = [
    "ExampleHiddenStatesConnector",
    "ExampleHiddenStatesConnectorMetadata",
    "PendingSave",
    "cleanup_hidden_states",
    "extract_from_kv_cache",
    "load_hidden_states",
]


def load_hidden_states(path: str | os.PathLike[str], raw: bool = False) -> dict[str, Tensor]:
    """`hidden_states [n, columns, hidden]` and `token_ids [n]`, as soon as they are complete.

    Rows that are stored in eight bits come back in the model's dtype; with `raw` as they are,
    beside `hidden_states_scales [n, columns, 1]`. FileNotFoundError when there is no lock file, or
    when the server could not write the data.
    """
    filename = os.fspath(path)
    with file_lock.reading(filename):
        if not os.path.exists(filename):
            raise FileNotFoundError(f"the server has not written {filename}; its log says why")
        return read_hidden_states(filename, raw)


def cleanup_hidden_states(path: str | os.PathLike[str], keep_hidden_states: bool = False) -> None:
    """Remove a request's lock file and, unless they are to be kept, its hidden states."""
    filename = os.fspath(path)
    for name in [file_lock.lock_path(filename)] + ([] if keep_hidden_states else [filename]):
        if os.path.exists(name):
            os.unlink(name)


class ExampleHiddenStatesConnector(HiddenStatesConnector[HiddenStatesSaver]):
    """Store-only. Settings (`kv_connector_extra_config`):

    - `shared_storage_path` (`/tmp`): directory of the files, made on demand;
    - `num_writer_threads` (8): files written at a time;
    - `use_synchronization_lock` (true): make and hold lock files;
    - `allow_custom_save_path` (false): honour a request's `hidden_states_path` below the directory;
    - `storage_dtype` (`auto`): `auto` or `fp8_e4m3`.

    Raises ValueError without extraction, or for settings that are unknown or of a wrong type. A
    class that derives from it says which it knows, `class X(..., setting_names=(...))`; of one that
    does not, any name is taken.
    """

    #: None: any
    setting_names: ClassVar[Sequence[str] | None] = _KEYS

    def __init_subclass__(cls, setting_names: Sequence[str] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.setting_names = setting_names

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        if self.setting_names is not None:
            extra = ExtraConfig(type(self).__name__, transfer.kv_connector_extra_config)
            extra.check_keys(self.setting_names)
        self._storage_path = storage_path(transfer)
        self._allow_custom_path = flag(transfer, "allow_custom_save_path", False)
        self._filenames: dict[str, str] = {}
        self._use_lock = flag(transfer, "use_synchronization_lock", True)
        self._num_writer_threads = num_writer_threads(transfer)
        if self._has_own_encoding and self._storage != "auto":
            name = type(self).__name__
            raise VLLMValidationError(
                f"{STORAGE_DTYPE_KEY} {self._storage!r}: {name} encodes rows itself "
                f"(_write_tensors); leave {STORAGE_DTYPE_KEY} out, or use "
                "ExampleHiddenStatesConnector",
                parameter=STORAGE_DTYPE_KEY,
                value=self._storage,
            )

    @classmethod
    def check_request(
        cls, kv_transfer_config: KVTransferConfig, params: dict[str, Any], num_completions: int
    ) -> None:
        allow_custom_path = flag(kv_transfer_config, "allow_custom_save_path", False)
        check_params(storage_path(kv_transfer_config), allow_custom_path, params, num_completions)

    @property
    def _has_own_encoding(self) -> bool:
        return self._write_tensors is not ExampleHiddenStatesConnector._write_tensors

    # ---- worker side ---------------------------------------------------------------------------

    def _make_saver(self, copier: RowCopier) -> HiddenStatesSaver:
        remove_leftovers(self._storage_path)
        write: WriteTensors = self._write_tensors
        if not self._has_own_encoding:
            write = partial(write_file, metadata=file_metadata(copier.format, self._layer_ids))
        return HiddenStatesSaver(
            copier,
            write,
            Storage(self._storage_path, self._use_lock),
            num_writer_threads=self._num_writer_threads,
            reserve_space=choose_reservation(self._storage_path),
        )

    def wait_for_save(self) -> None:
        """Take the locks of the requests that were scheduled for the first time."""
        if self._saver is not None:
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, ExampleHiddenStatesConnectorMetadata)
            self._saver.open_new(metadata)

    def take_failed_requests(self) -> dict[str, RequestError]:
        return {} if self._saver is None else self._saver.take_failed()

    @staticmethod
    def _write_tensors(
        tensors: dict[str, Tensor], event: CopyEvent, filename: str, lock_fd: int | None
    ) -> None:
        """Runs on a writer thread; subclasses override it to store another encoding.

        Waits for `event`, writes `filename` and closes `lock_fd`. An exception fails the file.
        """
        write_file(tensors, event, filename, lock_fd)

    # ---- scheduler side ------------------------------------------------------------------------

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> ExampleHiddenStatesConnectorMetadata:
        meta = ExampleHiddenStatesConnectorMetadata(pending_saves=self._pending)
        self._pending = []
        for new in scheduler_output.scheduled_new_reqs:
            try:
                filename = self._filename(new)
            except PathRefused as error:
                meta.rejected[new.req_id] = str(error)
                continue
            self._filenames[new.req_id] = filename
            meta.new_req_filenames[new.req_id] = filename
            meta.new_req_num_tokens[new.req_id] = len(new.prompt_token_ids or ())
        return meta

    def _filename(self, new: NewRequestData) -> str:
        extra = (new.sampling_params.extra_args if new.sampling_params is not None else None) or {}
        asked = (extra.get("kv_transfer_params") or {}).get("hidden_states_path")
        if asked is not None and self._allow_custom_path:
            return custom_path(self._storage_path, asked)
        if asked is not None:
            logger.warning(
                "request %s: hidden_states_path is ignored, allow_custom_save_path is false",
                new.req_id,
            )
        return default_path(self._storage_path, new.req_id)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Queue the save; `(False, None)` for requests without rows worth keeping.

        A request with fewer rows than tokens is turned into a failed one.
        """
        filename = self._filenames.pop(request.request_id, None)
        if filename is None or ended_badly(request):
            return False, None
        token_ids = tokens_to_save(request)
        problem = self._missing_rows(request, token_ids, block_ids)
        if problem is not None:
            end_with_error(request, problem)
            return False, None
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        save = PendingSave(request.request_id, filename, tokens, list(block_ids))
        self._pending.append(save)
        return True, {"hidden_states_path": filename}
