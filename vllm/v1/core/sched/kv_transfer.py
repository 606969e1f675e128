# SPDX-License-Identifier: Apache-2.0
"""The scheduler's conversation with its KV connector (order of calls: the connector base class)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import answers
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

logger = init_logger(__name__)

#: how often it is looked how long requests wait for reports, and after how long a warning is due
_LOOK_S, _SLOW_S = 10.0, 60.0


def create_scheduler_connector(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> KVConnectorBase_V1 | None:
    """The scheduler-side connector, or None when no KV transfer is configured."""
    transfer_config = vllm_config.kv_transfer_config
    if transfer_config is None or not transfer_config.is_kv_transfer_instance:
        return None
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.create_connector(
        vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config
    )


@dataclass(frozen=True)
class _Load:
    """What a connector brings for one request: the tokens from `start` to `end`, into `blocks`,
    pairs of state group and block. `step`: the number of the step that it was asked for in.
    `sharers`: once the request has given the blocks up, the requests that still hold some."""

    start: int
    end: int
    blocks: frozenset[tuple[int, int]]
    step: int
    sharers: frozenset[str] = frozenset()


class KVTransfer:
    """Which requests wait for transfers, and the calls into the connector.

    `loading`: requests whose prefix is being fetched beside the steps; their blocks must not be
    freed, and nothing of them counts as computed.
    `received`: loads that ended, not yet scheduled. `sending`: finished requests whose blocks the
    connector still reads.
    """

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        kv_cache_config: KVCacheConfig,
        manager: KVCacheManager,
    ) -> None:
        self.connector = connector
        self.loading: set[str] = set()
        self.received: set[str] = set()
        self.sending: set[str] = set()
        #: loads whose outcome is not known yet
        self._loads: dict[str, _Load] = {}
        #: those of steps in flight whose request has given its blocks up
        self._abandoned: list[_Load] = []
        self._num_ended_steps = 0
        #: requests that wait for a report: since when, and whether that was said
        self._waits: dict[str, tuple[float, bool]] = {}
        self._next_look_s = 0.0
        self._manager = manager
        self._all_groups = supports_hma(connector)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._block_sizes = [spec.block_size for spec in specs]
        self._recurrent_groups = {i for i, s in enumerate(specs) if s.is_recurrent}
        connector.bind_gpu_block_pool(manager.block_pool)

    @property
    def keeps_states(self) -> bool:
        """Whether the model has recurrent states."""
        return bool(self._recurrent_groups)

    def is_tracking(self, request_id: str) -> bool:
        """Whether a transfer still needs the request's blocks."""
        return request_id in self.loading or request_id in self.sending

    def holds_blocks(self, request_id: str) -> bool:
        """Whether a waiting request holds blocks because of a load."""
        return request_id in self.loading or request_id in self.received

    def after_allocation(
        self,
        request: Request,
        num_computed_tokens: int,
        num_external_tokens: int,
        num_steps_in_flight: int,
    ) -> None:
        """`num_external_tokens` of the `num_computed_tokens` are the connector's to load, for the
        step after those in flight."""
        if num_external_tokens:
            start = num_computed_tokens - num_external_tokens
            step = self._num_ended_steps + num_steps_in_flight
            self._note_load(request, start, num_computed_tokens, step)
        blocks = self._manager.get_blocks(request.request_id)
        self.connector.update_state_after_alloc(request, blocks, num_external_tokens)

    def _note_load(self, request: Request, start: int, end: int, step: int) -> None:
        blocks: set[tuple[int, int]] = set()
        block_ids = self._manager.get_block_ids(request.request_id)
        for group, (size, ids) in enumerate(zip(self._block_sizes, block_ids, strict=True)):
            if group not in self._recurrent_groups:  # a state is loaded as a whole
                ids = ids[start // size : -(-end // size)]
            blocks.update((group, block_id) for block_id in ids)
        self._loads[request.request_id] = _Load(start, end, frozenset(blocks), step)

    def abandon_load(self, request: Request) -> None:
        """The request gives its blocks up, maybe before it is known whether their content came.
        Blocks of a load that runs beside the steps stay until it ends."""
        if request.request_id in self.loading:
            return
        load = self._loads.pop(request.request_id, None)
        if load is not None:
            # Nobody finds them any more, so whoever gets one later fills it anew.
            sharers = self._manager.holders_of(load.blocks)
            self._abandoned.append(replace(load, sharers=frozenset(sharers)))
            self._forget_after(request, load.start)
        elif self._loads or self._abandoned:
            # What it computed after blocks of other requests' loads is as much in doubt.
            loads = (*self._loads.values(), *self._abandoned)
            in_doubt = {pair for one in loads for pair in one.blocks}
            valid = self.num_valid_tokens(request, in_doubt)
            if valid is not None:
                self._forget_after(request, valid)
        if not request.is_finished:  # one that ends may keep its blocks, for a transfer
            gone = {request.request_id}
            self._abandoned = [replace(one, sharers=one.sharers - gone) for one in self._abandoned]

    def _forget_after(self, request: Request, num_tokens: int) -> None:
        self._manager.forget_after(request, num_tokens)
        request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)

    def limit_load(self, request_id: str, num_tokens: int) -> None:
        """When the load beside the steps has ended, no more than `num_tokens` of the request's
        tokens count as computed. Without such a load nothing happens."""
        if request_id in self.loading:
            load = self._loads[request_id]
            self._loads[request_id] = replace(load, end=min(load.end, num_tokens))

    def cancel_failed(self, request: Request, valid: int) -> None:
        """Only the first `valid` of the request's tokens are there, or will be when its load beside
        the steps has ended; no other request may find more."""
        start = 0
        if request.request_id in self.loading:
            # What lies before such a load was found in the cache and is not in doubt.
            start = self._loads[request.request_id].start
            self.limit_load(request.request_id, valid)
        else:
            request.num_computed_tokens = valid
        self._manager.forget_after(request, max(valid, start))

    def failed_blocks(self, output: KVConnectorOutput) -> set[tuple[int, int]]:
        """Pairs of state group and block that failed to load."""
        failed = set(output.invalid_blocks)
        loads = (*self._loads.values(), *self._abandoned) if output.invalid_block_ids else ()
        for load in loads:
            failed.update(pair for pair in load.blocks if pair[1] in output.invalid_block_ids)
        return failed

    def _filled_anew(self, request_id: str) -> set[tuple[int, int]]:
        """Blocks of abandoned loads of the step that comes back which the request, if it holds
        them, has got since: it computes what is in them, or loads it in a later step."""
        anew: set[tuple[int, int]] = set()
        meant: set[tuple[int, int]] = set()
        for load in self._abandoned:
            if load.step == self._num_ended_steps:
                (meant if request_id in load.sharers else anew).update(load.blocks)
        for load in self._loads.values() if anew else ():
            if load.step <= self._num_ended_steps:
                meant |= load.blocks
        return anew - meant

    def end_step(self, scheduler_output: SchedulerOutput) -> None:
        """The step's loads are known to have come, or were reported as failed. A request that was
        preempted while it ran may have another load since."""
        for request_id in scheduler_output.num_scheduled_tokens if self._loads else ():
            load = self._loads.get(request_id)
            if load is not None and load.step == self._num_ended_steps:
                del self._loads[request_id]
        self._abandoned = [one for one in self._abandoned if one.step > self._num_ended_steps]
        self._num_ended_steps += 1
        self._warn_of_waits(time.monotonic())

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Tell the connector; (whether a transfer keeps the blocks, parameters for the client)."""
        request_id = request.request_id
        self.received.discard(request_id)
        self.abandon_load(request)
        delay, params = self._ask_at_the_end(request)
        if delay:
            self.sending.add(request_id)
        return delay or request_id in self.loading, params

    def _ask_at_the_end(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        block_ids = self._manager.get_block_ids(request.request_id)
        if self._all_groups:
            method = "request_finished_all_groups"
            answer = self.connector.request_finished_all_groups(request, block_ids)  # type: ignore[attr-defined]
        else:
            method = "request_finished"
            answer = self.connector.request_finished(request, block_ids[0])
        return answers.finished_request(self.connector, method, answer)

    def update(self, output: KVConnectorOutput, requests: Mapping[str, Request]) -> list[str]:
        """Take a step's report on these requests; returns ids of which no transfer needs the blocks
        any more."""
        self.connector.update_connector_output(output)
        ended: list[str] = []
        for request_id in output.finished_recving or ():
            if request_id not in self.loading:
                logger.warning("connector reports a load for %s, which has none", request_id)
                continue
            self.loading.remove(request_id)
            requests[request_id].num_computed_tokens = self._loads.pop(request_id).end
            self.received.add(request_id)
            ended.append(request_id)
        for request_id in output.finished_sending or ():
            if request_id not in self.sending:
                logger.warning("connector reports a send for %s, which has none", request_id)
                continue
            self.sending.remove(request_id)
            ended.append(request_id)
        return ended

    def _warn_of_waits(self, now_s: float) -> None:
        """Once per request. A connector that forgets to report one has its blocks for ever."""
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        waits = {one: self._waits.get(one, (now_s, False)) for one in self.loading | self.sending}
        slow = {
            one for one, (since, said) in waits.items() if not said and now_s >= since + _SLOW_S
        }
        self._waits = {one: (since, said or one in slow) for one, (since, said) in waits.items()}
        for what, requests in (("received", self.loading), ("sent", self.sending)):
            if late := sorted(slow & requests):
                logger.warning(
                    "for %g s %s.get_finished has not reported as %s: %s. They keep their blocks",
                    _SLOW_S,
                    type(self.connector).__name__,
                    what,
                    ", ".join(late),
                )

    def num_valid_tokens(self, request: Request, failed: set[tuple[int, int]]) -> int | None:
        """Tokens before the first block that failed to load, of those that are computed or will be
        when the load beside the steps has ended; None: all are valid.

        Recurrent state has no value in the middle, so with such a group nothing is valid; nor is
        anything before the window that was loaded.
        """
        failed = failed - self._filled_anew(request.request_id)
        loading = request.request_id in self.loading
        num_tokens = self._loads[request.request_id].end if loading else request.num_computed_tokens
        valid: int | None = None
        block_ids = self._manager.get_block_ids(request.request_id)
        for group, (size, ids) in enumerate(zip(self._block_sizes, block_ids, strict=True)):
            bad = next((i for i, b in enumerate(ids) if (group, b) in failed), None)
            if bad is not None:
                tokens = 0 if self._recurrent_groups else bad * size
                valid = tokens if valid is None else min(valid, tokens)
        if valid is None or valid >= num_tokens:
            return None
        return 0 if self.has_gaps(request) else valid

    def has_gaps(self, request: Request) -> bool:
        """Whether blocks of the request are missing that its first tokens would need."""
        block_ids = self._manager.get_block_ids(request.request_id)
        return any(ids and ids[0] == 0 for ids in block_ids)
