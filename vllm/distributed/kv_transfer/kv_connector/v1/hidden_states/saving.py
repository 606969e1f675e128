# SPDX-License-Identifier: Apache-2.0
"""The worker side: lock first, copy when finished, write in the background."""

import os
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import tensor_file
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.paths import PathRefused
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import (
    CopyEvent,
    RowCopier,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_saver import RowSaver
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.scheduling import (
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.spool import Storage, Target
from vllm.hidden_states_storage import StoredRows
from vllm.logger import init_logger
from vllm.v1.engine import RequestConflict, RequestError

logger = init_logger(__name__)

#: `(tensors, copy_event, path, lock_fd)`; waits for the event, writes, closes `lock_fd` if given
WriteTensors = Callable[[dict[str, Tensor], CopyEvent, str, int | None], None]


class HiddenStatesSaver(RowSaver):
    """Saves rows of one cache in files.

    Rows of a finished request stay in the cache until a writer has room for them, so a slow disk
    makes requests wait for blocks and never fills the host's memory.
    """

    def __init__(
        self,
        copier: RowCopier,
        write_tensors: WriteTensors,
        storage: Storage,
        *,
        num_writer_threads: int,
        reserve_space: bool,
    ) -> None:
        super().__init__(copier, num_writer_threads)
        self._write_tensors = write_tensors
        self._storage = storage
        self._reserve_space = reserve_space
        self._targets: dict[str, Target] = {}
        self._waiting: deque[PendingSave] = deque()
        self._failed: dict[str, RequestError] = {}

    def open_new(self, meta: ExampleHiddenStatesConnectorMetadata) -> None:
        """Lock the files of requests in their first step; what would fail later fails now."""
        for req_id, reason in meta.rejected.items():
            self._failed[req_id] = RequestConflict(reason)
        for req_id, path in meta.new_req_filenames.items():
            num_bytes = self._file_bytes(meta.new_req_num_tokens.get(req_id, 0))
            try:
                self._targets[req_id] = self._storage.claim(path, num_bytes)
            except PathRefused as error:
                self._failed[req_id] = RequestConflict(f"hidden states cannot be stored: {error}")
            except OSError as error:
                reason = f"hidden states cannot be stored: {_describe(error, path)}"
                logger.error("request %s: %s", req_id, reason)
                self._failed[req_id] = reason

    def take_failed(self) -> dict[str, RequestError]:
        failed, self._failed = self._failed, {}
        return failed

    def step(self, pending: list[PendingSave], finished_req_ids: set[str]) -> set[str]:
        """Take saves, start copies, drop ended requests; returns those whose copy is complete."""
        self._waiting.extend(pending)
        for req_id in finished_req_ids - {save.req_id for save in self._waiting}:
            self._discard(req_id)
        return self._start_copies() | self._take_copied()

    def shutdown(self) -> None:
        """Store what is finished, discard what is not."""
        while self._waiting:
            self._start_copies(wait_for_room=True)
        super().shutdown()
        for req_id in list(self._targets):
            self._discard(req_id)

    def _discard(self, req_id: str) -> None:
        target = self._targets.pop(req_id, None)
        if target is not None:
            self._storage.drop(target, promised=False)

    def _file_bytes(self, num_tokens: int) -> int:
        if not self._reserve_space:
            return 0
        token_id_bytes = torch.int64.itemsize
        row_bytes = self._copier.format.row_bytes + token_id_bytes
        return tensor_file.HEADER_ALLOWANCE + num_tokens * row_bytes

    # ---- saving --------------------------------------------------------------------------------

    def _start_copies(self, wait_for_room: bool = False) -> set[str]:
        """Start as many copies as the writers can take; returns requests that cannot be saved."""
        unsaved = set()
        while self._waiting and (wait_for_room or self._has_room):
            save = self._waiting.popleft()
            target = self._targets.pop(save.req_id, None)
            if target is None:
                logger.error("request %s: no file is open for its hidden states", save.req_id)
                unsaved.add(save.req_id)
                continue
            try:
                self._start(save, partial(self._write, save, target))
            except (ValueError, RuntimeError):
                logger.exception("request %s: hidden states were not copied", save.req_id)
                self._storage.drop(target, promised=True)
                unsaved.add(save.req_id)
        return unsaved

    def _write(self, save: PendingSave, target: Target, rows: StoredRows, event: CopyEvent) -> None:
        """On a writer thread. The data gets its name when complete, and before the lock ends."""
        try:
            tensors = {**rows.tensors, "token_ids": save.token_ids}
            # The writer closes a duplicate; the lock itself lasts until after the rename.
            lock_fd = None if target.lock_fd is None else os.dup(target.lock_fd)
            self._write_tensors(tensors, event, target.partial, lock_fd)
            self._storage.publish(target)
        except Exception:
            logger.exception(
                "request %s: hidden states were not written to %s", save.req_id, target.path
            )
            self._storage.drop(target, promised=True)


def _describe(error: OSError, path: str) -> str:
    return f"{error.strerror or error}: {error.filename or path}"


def write_file(
    tensors: dict[str, Tensor],
    event: CopyEvent,
    filename: str,
    lock_fd: int | None,
    metadata: dict[str, str] | None = None,
) -> None:
    """The default `WriteTensors`; ValueError unless every token has exactly one row. `metadata`: of
    the file."""
    try:
        event.synchronize()
        num_rows, num_tokens = len(tensors["hidden_states"]), len(tensors["token_ids"])
        if num_rows != num_tokens:
            raise ValueError(f"{num_rows} rows for {num_tokens} tokens")
        tensor_file.write(filename, tensors, metadata)
    finally:
        if lock_fd is not None:
            os.close(lock_fd)
