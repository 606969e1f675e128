# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: what is saved of a request that ended, and what the worker is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger
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


def end_with_error(request: Request, problem: str) -> None:
    """Turn a finished request into a failed one: its reply must not promise rows that nobody
    gets."""
    request.status = RequestStatus.FINISHED_ERROR
    request.error = problem
    logger.error("request %s: %s; nothing is stored", request.request_id, problem)
