# SPDX-License-Identifier: Apache-2.0
"""Hands captured hidden states to a trainer on this machine through shared memory.

Needs `speculative_config.method = "extract_hidden_states"`. The trainer reads them with
`vllm.hidden_states_ring.RingReader`. Guide: docs/extraction.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.group import (
    LAYER_NAME_MARKER,
    find_hidden_states_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import (
    CopyEvent,
    RowCopier,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.scheduling import tokens_to_save
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.writer_pool import WriterPool
from vllm.distributed.parallel_state import stores_hidden_states
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states_ring import POLICIES, Policy, RingWriter, Rows, record_bytes
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)

_KEYS = ("ring_path", "ring_bytes", "when_full")
_DEFAULT_BYTES = 2**30


@dataclass
class _Save:
    """A finished request: the rows of `token_ids` are in `block_ids`, which stay until it is
    reported as sent."""

    req_id: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class RingMetadata(KVConnectorMetadata):
    """A step's saves."""

    saves: list[_Save] = field(default_factory=list)


@dataclass(frozen=True)
class RingSettings:
    """`path` of the ring, its bytes, and what happens when it is full."""

    path: str
    num_bytes: int
    policy: Policy

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RingSettings:
        """Raises `VLLMValidationError` for unknown keys and values that cannot be honoured."""
        for key in given:
            if key not in _KEYS:
                known = ", ".join(_KEYS)
                raise _refused(key, given[key], f"kv_connector_extra_config knows {known}")
        path = given.get("ring_path")
        if not isinstance(path, str) or not path:
            raise _refused("ring_path", path, "name a file, such as /dev/shm/rows")
        num_bytes = given.get("ring_bytes", _DEFAULT_BYTES)
        if type(num_bytes) is not int or num_bytes <= 0:
            raise _refused("ring_bytes", num_bytes, "give a positive number of bytes")
        policy = given.get("when_full", "wait")
        if policy not in POLICIES:
            raise _refused("when_full", policy, f"choose one of {', '.join(POLICIES)}")
        return cls(path, num_bytes, policy)


def _refused(key: str, value: Any, instead: str) -> VLLMValidationError:
    message = f"RingHiddenStatesConnector: {key} {value!r}: {instead}"
    return VLLMValidationError(message, parameter=key, value=value)


class _Saver:
    """Copies rows out of one cache and puts them into the ring, on a thread of its own.

    While it has work for two requests the rows of others stay in the cache: with the policy `wait`
    a trainer that falls behind makes requests wait for blocks.
    """

    def __init__(self, cache: Tensor, settings: RingSettings) -> None:
        self._copier = RowCopier(cache)
        _, _, columns, hidden = cache.shape
        self._ring = RingWriter(settings.path, settings.num_bytes, columns, hidden, cache.dtype)
        self._policy = settings.policy
        self._pool = WriterPool(1)
        self._stopped = threading.Event()
        self._waiting: deque[_Save] = deque()
        self._copying: dict[str, CopyEvent] = {}

    def step(self, saves: list[_Save]) -> set[str]:
        """Take saves; returns the requests whose blocks are not needed any more."""
        self._waiting.extend(saves)
        while self._waiting and self._pool.has_room:
            save = self._waiting.popleft()
            rows, event = self._copier.copy(save.block_ids, len(save.token_ids))
            self._copying[save.req_id] = event
            self._pool.submit(partial(self._put, save, rows, event))
        sent = {req_id for req_id, event in self._copying.items() if event.query()}
        for req_id in sent:
            del self._copying[req_id]
        return sent

    def _put(self, save: _Save, hidden_states: Tensor, event: CopyEvent) -> None:
        try:
            event.synchronize()
            token_ids = torch.tensor(save.token_ids, dtype=torch.int64)
            rows = Rows(save.req_id, token_ids, hidden_states)
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
            self.step([])
        self._pool.drain()
        self._ring.close()


class RingHiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only. Settings (`kv_connector_extra_config`):

    - `ring_path`, required: a file in a file system in memory; made anew by each engine;
    - `ring_bytes` (1 GiB): its size;
    - `when_full` (`wait`): `wait` for the trainer, `drop_new` rows, or `drop_oldest`.

    Raises ValueError without extraction, for other settings, or while another engine writes there.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        speculative = vllm_config.speculative_config
        if speculative is None or not speculative.uses_extract_hidden_states():
            raise ValueError(
                "RingHiddenStatesConnector needs speculative_config.method 'extract_hidden_states'"
            )
        if kv_cache_config is None:
            raise ValueError("RingHiddenStatesConnector needs kv_cache_config")
        self._settings = RingSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        self._group = find_hidden_states_group(kv_cache_config)
        group = kv_cache_config.kv_cache_groups[self._group.index]
        self._row_bytes = group.kv_cache_spec.page_size_bytes // self._group.block_size
        self._saver: _Saver | None = None
        self._pending: list[_Save] = []

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

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        if not stores_hidden_states():
            return
        name = self._group.layer_name
        if name is None:
            [name] = [n for n in kv_caches if LAYER_NAME_MARKER in n]
        self._saver = _Saver(kv_caches[name], self._settings)

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
        assert isinstance(metadata, RingMetadata)
        if self._saver is None:  # rank 0 writes; this one will not touch the blocks
            return {save.req_id for save in metadata.saves} or None, None
        return self._saver.step(metadata.saves) or None, None

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

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> RingMetadata:
        pending, self._pending = self._pending, []
        return RingMetadata(pending)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
            return False, None
        token_ids = tokens_to_save(request)
        num_rows = min(request.num_computed_tokens, len(block_ids) * self._group.block_size)
        size = record_bytes(len(token_ids), self._row_bytes, request.request_id)
        problem = None
        if num_rows < len(token_ids):
            problem = f"{num_rows} rows of hidden states for {len(token_ids)} tokens"
        elif size > self._settings.num_bytes:
            problem = f"{size} bytes of rows in a ring of {self._settings.num_bytes}"
        if problem is not None:
            # The reply must not promise rows that nobody gets: the request ends with an error.
            request.status = RequestStatus.FINISHED_ERROR
            request.error = problem
            logger.error("request %s: %s", request.request_id, problem)
            return False, None
        self._pending.append(_Save(request.request_id, token_ids, list(block_ids)))
        ring = {"hidden_states_ring": self._settings.path, "hidden_states_id": request.request_id}
        return True, ring

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self._group.index])

    def has_pending_push_work(self) -> bool:
        return bool(self._pending)
