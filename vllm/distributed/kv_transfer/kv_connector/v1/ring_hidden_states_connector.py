# SPDX-License-Identifier: Apache-2.0
"""Hands captured hidden states to a trainer on this machine through shared memory.

Needs `speculative_config.method = "extract_hidden_states"`. The trainer reads them with
`vllm.hidden_states_ring.RingReader`. Guide: docs/extraction.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from vllm.hidden_states_ring import POLICIES, Policy, RingWriter, Rows
from vllm.hidden_states_ring_file import record_bytes
from vllm.hidden_states_storage import STORAGE_DTYPE_KEY, StoredRows
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

logger = init_logger(__name__)

_KEYS = ("ring_path", "ring_bytes", "when_full", STORAGE_DTYPE_KEY)
_DEFAULT_BYTES = 2**30


@dataclass(frozen=True)
class RingSettings:
    """`path` of the ring, its bytes, and what happens when it is full."""

    path: str
    num_bytes: int
    policy: Policy

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RingSettings:
        """Raises `VLLMValidationError` for unknown keys and values that cannot be honoured."""
        extra = ExtraConfig("RingHiddenStatesConnector", given)
        extra.check_keys(_KEYS)
        path = given.get("ring_path")
        if not isinstance(path, str) or not path:
            raise extra.refused("ring_path", path, "name a file, such as /dev/shm/rows")
        num_bytes = given.get("ring_bytes", _DEFAULT_BYTES)
        if type(num_bytes) is not int or num_bytes <= 0:
            raise extra.refused("ring_bytes", num_bytes, "give a positive number of bytes")
        policy = given.get("when_full", "wait")
        if policy not in POLICIES:
            raise extra.refused("when_full", policy, f"choose one of {', '.join(POLICIES)}")
        return cls(path, num_bytes, policy)


class _Saver(RowSaver):
    """Puts rows of one cache into the ring, on a thread of its own.

    While it has work for two requests the rows of others stay in the cache: with the policy `wait`
    a trainer that falls behind makes requests wait for blocks.
    """

    def __init__(self, copier: RowCopier, settings: RingSettings) -> None:
        super().__init__(copier, num_threads=1)
        self._ring = RingWriter(settings.path, settings.num_bytes, copier.format)
        self._policy = settings.policy
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
            if not self._ring.put(rows, self._policy, self._stopped.is_set):
                logger.warning(
                    "request %s: its rows are dropped, the ring is full (%d so far)",
                    save.req_id,
                    self._ring.num_dropped,
                )
        except Exception:
            logger.exception("request %s: its rows are not in the ring", save.req_id)

    def shutdown(self) -> None:
        """Put in what there is room for; whoever reads is told of the end."""
        self._stopped.set()
        while self._waiting:
            self.step([], set())
        super().shutdown()
        self._ring.close()


class RingHiddenStatesConnector(HiddenStatesConnector[_Saver]):
    """Store-only. Settings (`kv_connector_extra_config`):

    - `ring_path`, required: a file in a file system in memory; made anew by each engine;
    - `ring_bytes` (1 GiB): its size;
    - `when_full` (`wait`): `wait` for the trainer, `drop_new` rows, or `drop_oldest`;
    - `storage_dtype` (`auto`): `auto` or `fp8_e4m3`.

    Raises ValueError without extraction, for other settings, or while another engine writes there.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = RingSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        self._row_bytes = self._group.row_format(self._storage).row_bytes

    def _make_saver(self, copier: RowCopier) -> _Saver:
        return _Saver(copier, self._settings)

    # ---- scheduler side ------------------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if ended_badly(request):
            return False, None
        token_ids = tokens_to_save(request)
        problem = self._missing_rows(request, token_ids, block_ids)
        size = record_bytes(len(token_ids), self._row_bytes, request.request_id)
        if problem is None and size > self._settings.num_bytes:
            problem = f"{size} bytes of rows in a ring of {self._settings.num_bytes}"
        if problem is not None:
            end_with_error(request, problem)
            return False, None
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        self._pending.append(RowSave(request.request_id, tokens, list(block_ids)))
        ring = {"hidden_states_ring": self._settings.path, "hidden_states_id": request.request_id}
        return True, ring
