# SPDX-License-Identifier: Apache-2.0
"""Several connectors as one: every child saves, the first one with a match loads.

`kv_connector_extra_config = {"connectors": [<kv_transfer_config>, ...]}`, in order of preference.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import answers
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_children import (
    MultiConnectorClass,
    children_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_messages import (
    MultiKVConnectorHandshakeMetadata,
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
    MultiKVConnectorWorkerMetadata,
    MultiKVEvents,
    child_key,
    handshake_parts,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import RequestError, RequestFailure
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)

P = ParamSpec("P")
Finished = tuple[bool, dict[str, Any] | None]


def _by_each(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """The same method of every child, one after another."""
    name = method.__name__

    # Not what `method` has in its `__dict__`: it may be marked as abstract.
    @wraps(method, updated=())
    def forward(self: MultiConnector, *args: P.args, **kwargs: P.kwargs) -> None:
        for child in self._children:
            getattr(child, name)(*args, **kwargs)

    return forward


class MultiConnector(MultiConnectorClass, SupportsHMA):
    """Forwards every call to its children; see the module docstring for who loads."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._children: list[KVConnectorBase_V1] = []
        for _, child_config in children_of(vllm_config):
            child = KVConnectorFactory.create_connector(child_config, role, kv_cache_config)
            child.share_transfers_ended(self._transfers_ended)
            self._children.append(child)
        # Scheduler side: which child loads a request.
        self._loading: dict[str, int] = {}
        # Scheduler side: how many further children hold a finished request's blocks.
        self._extra_holders: dict[str, int] = {}
        # Worker side: reports still missing of requests that several children send.
        self._extra_async_saves: dict[str, int] = {}

    # ---- capabilities --------------------------------------------------------------------------

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return all(child.prefer_cross_layer_blocks for child in self._children)

    @property
    def can_leave_memory(self) -> bool:
        return all(child.can_leave_memory for child in self._children)

    leave_memory = _by_each(KVConnectorBase_V1.leave_memory)

    # ---- worker side ---------------------------------------------------------------------------

    register_memory = _by_each(KVConnectorBase_V1.register_memory)
    register_kv_caches = _by_each(KVConnectorBase_V1.register_kv_caches)
    register_cross_layers_kv_cache = _by_each(KVConnectorBase_V1.register_cross_layers_kv_cache)
    set_host_xfer_buffer_ops = _by_each(KVConnectorBase_V1.set_host_xfer_buffer_ops)
    start_load_kv = _by_each(KVConnectorBase_V1.start_load_kv)
    wait_for_layer_load = _by_each(KVConnectorBase_V1.wait_for_layer_load)
    save_kv_layer = _by_each(KVConnectorBase_V1.save_kv_layer)
    wait_for_save = _by_each(KVConnectorBase_V1.wait_for_save)

    def share_transfers_ended(self, event: threading.Event) -> None:
        super().share_transfers_ended(event)
        for child in self._children:
            child.share_transfers_ended(event)

    def _with_parts(
        self, message: KVConnectorMetadata
    ) -> Iterator[tuple[KVConnectorBase_V1, KVConnectorMetadata]]:
        """Each child with its part of a step's message."""
        assert isinstance(message, MultiKVConnectorMetadata)
        return zip(self._children, message.metadata, strict=True)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        for child, metadata in self._with_parts(kv_connector_metadata):
            child.handle_preemptions(metadata)

    def will_read_recurrent_state(self, connector_metadata: KVConnectorMetadata) -> bool:
        parts = self._with_parts(connector_metadata)
        return any(child.will_read_recurrent_state(metadata) for child, metadata in parts)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, MultiKVConnectorMetadata)
        super().bind_connector_metadata(connector_metadata)
        self._extra_async_saves.update(connector_metadata.extra_async_saves)
        for child, metadata in self._with_parts(connector_metadata):
            child.bind_connector_metadata(metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for child in self._children:
            child.clear_connector_metadata()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent: set[str] = set()
        received: set[str] = set()
        for child in self._children:
            reported = child.get_finished(finished_req_ids)
            sending, recving = answers.finished_transfers(child, reported)
            received |= recving or set()
            sent |= {req_id for req_id in sending or () if self._last_report(req_id)}
        return sent or None, received or None

    def _last_report(self, req_id: str) -> bool:
        """Count one child's report of a sent request; True when no other child holds its blocks."""
        missing = self._extra_async_saves.pop(req_id, 0)
        if missing > 1:
            self._extra_async_saves[req_id] = missing - 1
        return missing == 0

    def get_blocks_with_load_errors(self) -> set[tuple[int, int]]:
        return set().union(
            *(answers.blocks(c, c.get_blocks_with_load_errors()) for c in self._children)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set().union(
            *(answers.block_ids(c, c.get_block_ids_with_load_errors()) for c in self._children)
        )

    def take_failed_requests(self) -> dict[str, RequestError]:
        failed: dict[str, RequestError] = {}
        for child in self._children:
            own = answers.failed_requests(child, child.take_failed_requests())
            failed = {**own, **failed}
        return failed

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        data: dict[str, Any] = {}
        for index, child in enumerate(self._children):
            stats = answers.stats(child, child.get_kv_connector_stats())
            if stats is not None:
                data[child_key(index, type(child))] = stats
        return MultiKVConnectorStats(data) if data else None

    def get_kv_connector_kv_cache_events(self) -> MultiKVEvents | None:
        return MultiKVEvents.of(
            child.get_kv_connector_kv_cache_events() for child in self._children
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return MultiKVConnectorWorkerMetadata.of(
            answers.worker_meta(child, child.build_connector_worker_meta())
            for child in self._children
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return MultiKVConnectorHandshakeMetadata.of(
            child.get_handshake_metadata() for child in self._children
        )

    def shutdown(self) -> None:
        """Shut every child down; the first error is raised when all have been asked."""
        errors = []
        for child in self._children:
            try:
                child.shutdown()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # ---- scheduler side ------------------------------------------------------------------------

    on_new_request = _by_each(KVConnectorBase_V1.on_new_request)
    bind_gpu_block_pool = _by_each(KVConnectorBase_V1.bind_gpu_block_pool)

    def get_prefix_hash_root(self) -> bytes | None:
        """The children's common demand; ValueError when they differ."""
        roots = {child.get_prefix_hash_root() for child in self._children} - {None}
        if len(roots) > 1:
            raise ValueError(
                "connectors need different roots of prefix hashes: let them share one directory, "
                "or set PYTHONHASHSEED, which all of them follow"
            )
        return roots.pop() if roots else None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        chosen: tuple[int, bool] = (0, False)
        undecided = False
        for index, child in enumerate(self._children):
            # Every child is asked, since some start a lookup that they answer later.
            found = child.get_num_new_matched_tokens(request, num_computed_tokens)
            num_tokens, runs_beside = answers.matched_tokens(child, found)
            if num_tokens is None:
                undecided = True
            elif num_tokens > 0 and chosen[0] == 0:
                chosen = (num_tokens, runs_beside)
                self._loading[request.request_id] = index
        return (None, False) if undecided else chosen

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        loading = self._loading.get(request.request_id)
        nothing = blocks.new_empty()
        for index, child in enumerate(self._children):
            if index == loading:
                child.update_state_after_alloc(request, blocks, num_external_tokens)
            else:
                child.update_state_after_alloc(request, nothing, 0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        extra, self._extra_holders = self._extra_holders, {}
        return MultiKVConnectorMetadata(
            tuple(
                answers.metadata(child, child.build_connector_meta(scheduler_output))
                for child in self._children
            ),
            extra,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if not isinstance(meta, MultiKVConnectorWorkerMetadata):
            for child in self._children:
                child.update_connector_output(connector_output)
            return
        for child, part in zip(self._children, meta.parts, strict=True):
            output = copy.copy(connector_output)
            output.kv_connector_worker_meta = part
            child.update_connector_output(output)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finished:
        def ask(child: KVConnectorBase_V1) -> Finished:
            answer = child.request_finished(request, block_ids)
            return answers.finished_request(child, "request_finished", answer)

        return self._finish(request, ask)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> Finished:
        def ask(child: KVConnectorBase_V1) -> Finished:
            if isinstance(child, SupportsHMA):
                answer = child.request_finished_all_groups(request, block_ids)
                return answers.finished_request(child, "request_finished_all_groups", answer)
            [only_group] = block_ids
            answer = child.request_finished(request, only_group)
            return answers.finished_request(child, "request_finished", answer)

        return self._finish(request, ask)

    def _finish(self, request: Request, ask: Callable[[KVConnectorBase_V1], Finished]) -> Finished:
        """Every child is told. Where one fails, or a second one answers the client, the request
        ends with an error, and its blocks stay for those that read them."""
        req_id = request.request_id
        num_saves = 0
        replies: list[dict[str, Any]] = []
        self._loading.pop(req_id, None)
        failure: Exception | None = None
        for child in self._children:
            try:
                keep_blocks, params = ask(child)
            except Exception as error:
                logger.exception("%s failed at the end of %s", type(child).__name__, req_id)
                failure = failure or error
                continue
            num_saves += keep_blocks
            replies += [params] if params is not None else []
        if len(replies) > 1:
            failure = RuntimeError("more than one connector returned kv_transfer_params")
        if num_saves > 1:
            self._extra_holders[req_id] = num_saves - 1
        if failure is not None and request.status is not RequestStatus.FINISHED_ABORTED:
            request.status = RequestStatus.FINISHED_ERROR
            request.error = RequestFailure.of("save", failure)
        answered = replies if failure is None else []
        return num_saves > 0, next(iter(answered), None)

    def has_pending_push_work(self) -> bool:
        return any(child.has_pending_push_work() for child in self._children)

    def take_events(self) -> Iterable[Any]:
        for child in self._children:
            yield from child.take_events()

    def get_finished_count(self) -> int | None:
        """The children's common answer; ValueError when they differ."""
        counts = {child.get_finished_count() for child in self._children}
        if len(counts) > 1:
            raise ValueError(f"connectors need reports of different numbers of workers: {counts}")
        return counts.pop()

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        for index, child in enumerate(self._children):
            child.set_xfer_handshake_metadata(handshake_parts(metadata, index))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for index, child in enumerate(self._children):
            child.set_xfer_handshake_metadata_pp_aware(handshake_parts(metadata, index))

    def reset_cache(self) -> bool | None:
        known = [done for child in self._children if (done := child.reset_cache()) is not None]
        return all(known) if known else None
