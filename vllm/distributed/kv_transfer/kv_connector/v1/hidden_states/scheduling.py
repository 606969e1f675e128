# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: which file each request gets, and when its rows are saved."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.paths import (
    PathRefused,
    custom_path,
    default_path,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus


@dataclass
class RowSave:
    """A finished request whose rows are to be stored.

    `token_ids [n]` int64 on the CPU; the rows are tokens 0..n-1 of `block_ids`, which stay
    allocated until the request is reported as sent.
    """

    req_id: str
    token_ids: Tensor
    block_ids: list[int]


@dataclass
class PendingSave:
    """The same, with the file that they go to."""

    req_id: str
    filename: str
    token_ids: Tensor
    block_ids: list[int]


@dataclass
class RowsMetadata(KVConnectorMetadata):
    """One step: requests that ended."""

    pending_saves: Sequence[RowSave | PendingSave] = field(default_factory=list)


@dataclass
class ExampleHiddenStatesConnectorMetadata(RowsMetadata):
    """One step. `new_req_filenames`: requests scheduled for the first time -> their file.

    `new_req_num_tokens`: the rows such a request will certainly store. `rejected`: request id ->
    why it can have no file.
    """

    pending_saves: list[PendingSave] = field(default_factory=list)
    new_req_filenames: dict[str, str] = field(default_factory=dict)
    new_req_num_tokens: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)


logger = init_logger(__name__)


def tokens_to_save(request: Request) -> list[int]:
    """The tokens of a finished request whose rows are wanted."""
    params = request.kv_transfer_params or {}
    if params.get("include_output_tokens", False):
        # The last token was sampled but never went through the model: it has no row.
        return request.all_token_ids[:-1]
    return request.prompt_token_ids


def ended_badly(request: Request) -> bool:
    """Whether a finished request has no rows worth keeping."""
    return request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


def missing_rows(request: Request, token_ids: list[int], num_slots: int) -> str | None:
    """What is wrong if `num_slots` slots of its blocks do not hold a row of each token."""
    num_rows = min(request.num_computed_tokens, num_slots)
    if num_rows < len(token_ids):
        return f"{num_rows} rows of hidden states for {len(token_ids)} tokens"
    return None


def end_with_error(request: Request, problem: str) -> None:
    """Turn a finished request into a failed one: its reply must not promise rows that nobody
    gets."""
    request.status = RequestStatus.FINISHED_ERROR
    request.error = problem
    logger.error("request %s: %s; nothing is stored", request.request_id, problem)


class ExtractionScheduler:
    """Bookkeeping of one engine; knows integers and file names only."""

    def __init__(self, storage_path: str, allow_custom_path: bool, block_size: int) -> None:
        self._storage_path = storage_path
        self._allow_custom_path = allow_custom_path
        self._block_size = block_size
        self._filenames: dict[str, str] = {}
        self._pending: dict[str, PendingSave] = {}

    @property
    def has_pending(self) -> bool:
        """Whether saves wait for the next step's message."""
        return bool(self._pending)

    def build_meta(self, scheduler_output: SchedulerOutput) -> ExampleHiddenStatesConnectorMetadata:
        meta = ExampleHiddenStatesConnectorMetadata(pending_saves=list(self._pending.values()))
        self._pending.clear()
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
        problem = missing_rows(request, token_ids, len(block_ids) * self._block_size)
        if problem is not None:
            end_with_error(request, problem)
            return False, None
        self._pending[request.request_id] = PendingSave(
            req_id=request.request_id,
            filename=filename,
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            block_ids=list(block_ids),
        )
        return True, {"hidden_states_path": filename}

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
