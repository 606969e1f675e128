# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side of hidden-state extraction tells the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


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
