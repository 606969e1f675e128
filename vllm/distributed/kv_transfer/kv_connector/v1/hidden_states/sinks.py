# SPDX-License-Identifier: Apache-2.0
"""Rows that leave for a trainer while the engine runs: what rings and streams have in common."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.extra_config import ExtraConfig
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.connector import (
    HiddenStatesConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import (
    CopyEvent,
    RowCopier,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_saver import RowSaver
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.scheduling import (
    RowSave,
    end_with_error,
    ended_badly,
    tokens_to_save,
)
from vllm.hidden_states_record import POLICIES, Policy, Rows, RowWriter
from vllm.hidden_states_storage import StoredRows
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

logger = init_logger(__name__)

WHEN_FULL = "when_full"


def policy_of(extra: ExtraConfig) -> Policy:
    """Raises `VLLMValidationError` for none that is known."""
    policy = extra.given.get(WHEN_FULL, "wait")
    if policy not in POLICIES:
        raise extra.refused(WHEN_FULL, policy, f"choose one of {', '.join(POLICIES)}")
    found: Policy = policy
    return found


def num_bytes_of(extra: ExtraConfig, key: str, default: int) -> int:
    """Raises `VLLMValidationError` for anything but a positive integer."""
    num_bytes = extra.given.get(key, default)
    if type(num_bytes) is not int or num_bytes <= 0:
        raise extra.refused(key, num_bytes, "give a positive number of bytes")
    return num_bytes


class SinkSaver(RowSaver):
    """Puts rows of one cache into `writer`, on a thread of its own.

    While it has work for two requests the rows of others stay in the cache: with the policy `wait`
    a trainer that falls behind makes requests wait for blocks. `where`: for log lines.
    """

    def __init__(self, copier: RowCopier, writer: RowWriter, policy: Policy, where: str) -> None:
        super().__init__(copier, num_threads=1)
        self._writer, self._policy, self._where = writer, policy, where
        self._stopped = threading.Event()
        self._waiting: deque[RowSave] = deque()

    def step(self, saves: Sequence[RowSave], finished_req_ids: set[str]) -> set[str]:
        self._waiting.extend(saves)
        while self._waiting and self._has_room:
            save = self._waiting.popleft()
            self._start(save, partial(self._put, save))
        return self._take_copied()

    def _put(self, save: RowSave, stored: StoredRows, event: CopyEvent) -> None:
        try:
            event.synchronize()
            rows = Rows(save.req_id, save.token_ids, stored.hidden_states, stored.scales)
            if not self._writer.put(rows, self._policy, self._stopped.is_set):
                logger.warning(
                    "request %s: its rows are dropped, the %s is full (%d so far)",
                    save.req_id,
                    self._where,
                    self._writer.num_dropped,
                )
        except Exception:
            logger.exception("request %s: its rows are not in the %s", save.req_id, self._where)

    def shutdown(self) -> None:
        """Put in what there is room for; whoever reads is told of the end."""
        self._stopped.set()
        while self._waiting:
            self.step([], set())
        super().shutdown()
        self._writer.close()


class SinkConnector(HiddenStatesConnector[SinkSaver]):
    """Store-only: each finished request's rows are one record for a trainer."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._format = self._group.row_format(self._storage)

    @abstractmethod
    def _no_room(self, num_rows: int, request_id: str) -> str | None:
        """Why so many rows can never be handed on; None if they can."""

    @abstractmethod
    def _place(self) -> dict[str, Any]:
        """What a reply says of where the rows are."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if ended_badly(request):
            return False, None
        token_ids = tokens_to_save(request)
        problem = self._missing_rows(request, token_ids, block_ids)
        problem = problem or self._no_room(len(token_ids), request.request_id)
        if problem is not None:
            end_with_error(request, problem)
            return False, None
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        self._pending.append(RowSave(request.request_id, tokens, list(block_ids)))
        return True, {**self._place(), "hidden_states_id": request.request_id}
