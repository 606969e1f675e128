# SPDX-License-Identifier: Apache-2.0
"""An engine with a real scheduler, real arenas and a real connector, and a model that only keeps
books (see `state`): hundreds of lives of requests in a second, every byte checked.
"""

from __future__ import annotations

import copy
import math
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.sampling_params import SamplingParams
from vllm.testing.connectors.case import ConnectorCase, ContractViolation
from vllm.testing.connectors.layouts import LAYOUTS, make_config
from vllm.testing.connectors.state import marks_of, next_token
from vllm.testing.connectors.worker import SimulatedWorker, Work, Wrong
from vllm.utils.hashing import sha256
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    pages_per_request,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason, RequestError, RequestFailure
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

#: longest wait for transfers, and of one step for the end of one
_SETTLE_S = 20.0
_PAUSE_S = 0.001


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model answers, computed without any state."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(marks_of(tokens)[-1]))
    return tokens[len(prompt) :]


def _memory(config: VllmConfig, kind: str, room: float) -> KVCacheConfig:
    """State memory for `room` requests of the greatest length."""
    groups = get_kv_cache_groups(config, LAYOUTS[kind])
    plan = plan_arena(groups, num_pages=1)
    longest = config.model_config.max_model_len
    batched = config.scheduler_config.max_num_batched_tokens
    pages = 1 + math.ceil(room * pages_per_request(groups, plan, batched, longest))
    ranks = config.parallel_config.tensor_parallel_size
    sizes = [pages * plan.page_bytes] * ranks
    return get_kv_cache_configs(config, [LAYOUTS[kind]] * ranks, sizes)[0]


class SimulatedEngine:
    """One engine around the connector of `case`; `room` requests of the greatest length fit.

    `report_delay`: how many steps a worker's report takes to the scheduler, called per report.
    """

    def __init__(
        self,
        case: ConnectorCase,
        kind: str,
        directory: Path,
        *,
        policy: str = "recompute",
        room: float = 5.0,
        report_delay: Callable[[], int] = lambda: 0,
        **arguments: Any,
    ) -> None:
        storage = directory / "storage"
        storage.mkdir(parents=True, exist_ok=True)
        self.storage = storage
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 48, **case.options, **arguments}
        self.config = make_config(
            kind,
            directory / "model",
            kv_transfer_config=case.transfer_config(storage, policy),
            tensor_parallel_size=case.num_workers,
            **settings,
        )
        cache = _memory(self.config, kind, room)
        ranks = range(case.num_workers)
        self.workers = [SimulatedWorker(self.config, cache, rank, len(ranks)) for rank in ranks]
        self.scheduler = Scheduler(self.config, cache)
        connector = self.scheduler.get_kv_connector()
        assert connector is not None
        self.connector = connector
        told = {(0, w.rank): w.connector.get_handshake_metadata() for w in self.workers}
        handshakes = {ranks: given for ranks, given in told.items() if given is not None}
        if handshakes:
            connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self._reports = KVOutputAggregator.from_connector(connector, len(self.workers))
        init_none_hash(sha256, connector.get_prefix_hash_root())
        self._hasher = get_request_block_hasher(16, sha256)
        self._report_delay = report_delay
        self._late: list[tuple[int, KVConnectorOutput]] = []
        self._num_steps = 0
        self._num_requests = 0
        self.outputs: dict[str, EngineCoreOutput] = {}
        self.tokens: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

    @property
    def worker(self) -> KVConnectorBase_V1:
        """The first rank's connector."""
        return self.workers[0].connector

    # ---- requests ------------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **params: Any) -> str:
        """Queue a request; returns its id."""
        self._num_requests += 1
        name = f"r{self._num_requests}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, **params)
        request = Request(name, list(prompt), sampling, block_hasher=self._hasher)
        self.requests[name], self.tokens[name] = request, []
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        with self._calling("abort"):
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt(self) -> bool:
        """Take the newest running request's blocks, as a full memory would."""
        if not self.scheduler.running:
            return False
        self.scheduler._preempt_last()
        return True

    def evict_device(self) -> None:
        """Forget what the device caches, so that only the connector can bring it back."""
        self.settle()
        if not self.scheduler.reset_prefix_cache():
            usage = self.scheduler.kv_cache_manager.usage
            raise ContractViolation("blocks-leaked", f"{usage:.1%} of the arena, without requests")

    def generate(self, *prompts: Sequence[int], max_tokens: int = 4) -> list[EngineCoreOutput]:
        """Run prompts to their ends."""
        names = [self.add(prompt, max_tokens) for prompt in prompts]
        self.settle()
        return [self.outputs[name] for name in names]

    # ---- steps ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """Step until nothing is left to do or to wait for."""
        deadline, num_tokens = time.monotonic() + _SETTLE_S, 0
        while self.scheduler.has_requests() or self._late:
            num_tokens = self.step(0.0 if num_tokens else _PAUSE_S)
            if time.monotonic() > deadline:
                waiting = sorted(self.scheduler.requests)
                pushes = self.connector.has_pending_push_work()
                raise ContractViolation(
                    "never-settles", f"requests {waiting} are left, pending push work: {pushes}"
                )

    def step(self, pause_s: float = 0.0) -> int:
        """One step; the number of its tokens. Without any the workers wait up to `pause_s` for a
        transfer to end."""
        self._num_steps += 1
        output = self._schedule()
        result = self._run(output, pause_s)
        result.kv_connector_output = self._delayed(result.kv_connector_output)
        with self._calling("update_connector_output"):
            produced = self.scheduler.update_from_output(output, result)
        for outputs in produced.values():
            for item in outputs.outputs:
                self.tokens[item.request_id] += item.new_token_ids
                if isinstance(item.error, RequestFailure):
                    matched = "the KV connector matched" in item.error.message
                    name = "matched-too-much" if matched else "raised"
                    raise ContractViolation(name, f"{item.request_id}: {item.error}")
                if item.finish_reason is not None:
                    self.outputs[item.request_id] = item
        return output.total_num_scheduled_tokens

    def _schedule(self) -> SchedulerOutput:
        """Schedule, checking what the connector does to the step's message."""
        build, seen = self.connector.build_connector_meta, []

        def checked(output: SchedulerOutput) -> Any:
            before = copy.deepcopy(vars(output))
            metadata = build(output)
            if vars(output) != before:
                raise ContractViolation("step-changed", f"step {self._num_steps}")
            try:
                seen.append(pickle.loads(pickle.dumps(metadata)))
            except Exception as error:
                raise ContractViolation("metadata-not-picklable", repr(error)) from error
            return seen[0]

        transfer = self.scheduler.transfer
        assert transfer is not None
        with self._calling("schedule"):
            self.connector.__dict__["build_connector_meta"] = checked
            try:
                return self.scheduler.schedule()
            finally:
                del self.connector.__dict__["build_connector_meta"]

    def _run(self, output: SchedulerOutput, pause_s: float) -> ModelRunnerOutput:
        """The workers' part of a step."""
        work, results, wrong = self._work(output), [], []
        with self._calling("step"):
            for worker in self.workers:
                result, found = worker.step(output, work, pause_s)
                results.append(result)
                wrong += found
        joined = self._reports.aggregate(results)
        assert joined is not None and joined.kv_connector_output is not None
        self._check_state(wrong, joined.kv_connector_output, joined.failed_req_ids)
        return joined

    def _work(self, output: SchedulerOutput) -> list[Work]:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        manager = self.scheduler.kv_cache_manager
        return [
            Work(
                name,
                computed[name],
                count,
                marks_of(self.requests[name].all_token_ids),
                manager.get_block_ids(name),
            )
            for name, count in output.num_scheduled_tokens.items()
        ]

    def _check_state(
        self, wrong: list[Wrong], report: KVConnectorOutput, failed: dict[str, RequestError]
    ) -> None:
        """Wrong state is fine only if the connector says so: the scheduler undoes the step."""
        for one in wrong:
            blocks = {(one.group, block) for block in one.block_ids}
            if blocks & report.invalid_blocks or set(one.block_ids) & report.invalid_block_ids:
                continue
            if one.name in failed:
                continue
            whose = self.scheduler.requests.get(one.name)
            if whose is not None and self._is_failing(one.name, report):
                continue
            kind = self.workers[one.rank].groups[one.group].spec.kind
            raise ContractViolation(
                "wrong-bits",
                f"request {one.name}, rank {one.rank}, state group {one.group} ({kind}), "
                f"token {one.position}",
            )

    def _is_failing(self, name: str, report: KVConnectorOutput) -> bool:
        """Whether any group of the request has a reported block."""
        block_ids = self.scheduler.kv_cache_manager.get_block_ids(name)
        return any(
            (group, block) in report.invalid_blocks or block in report.invalid_block_ids
            for group, ids in enumerate(block_ids)
            for block in ids
        )

    def _delayed(self, report: KVConnectorOutput | None) -> KVConnectorOutput | None:
        """Reports may take several steps and overtake one another; errors come with their step."""
        assert report is not None
        if report.invalid_blocks or report.invalid_block_ids:
            return report
        if not report.is_empty():
            self._late.append((self._num_steps + self._report_delay(), report))
        due = [late for late in self._late if late[0] <= self._num_steps]
        if not due:
            return None
        self._late.remove(due[-1])
        return due[-1][1]

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Errors of the block break the contract; they name the connector's call, if any."""
        try:
            yield
        except ContractViolation:
            raise
        except Exception as error:
            called = (frame.name for frame in traceback.extract_tb(error.__traceback__))
            call = next((name for name in called if hasattr(KVConnectorBase_V1, name)), what)
            raise ContractViolation("raised", f"{call}: {error!r}") from error

    # ---- the end -------------------------------------------------------------------------------

    def damage(self, case: ConnectorCase, how: str) -> bool:
        """What the last rank keeps; of several the others' is left whole."""
        return case.damage(self.connector, self.workers[-1].connector, self.storage, how)

    def check_nothing_left(self) -> None:
        """After `settle`: nobody holds a block."""
        manager, transfer = self.scheduler.kv_cache_manager, self.scheduler.transfer
        assert transfer is not None
        held = manager.usage, transfer.loading, transfer.received, transfer.sending
        if any(held):
            raise ContractViolation("blocks-leaked", f"usage and transfers: {held}")

    def shutdown(self) -> None:
        with self._calling("shutdown"):
            for worker in self.workers:
                worker.connector.shutdown()
            self.scheduler.shutdown()

    def reason(self, name: str) -> FinishReason | None:
        output = self.outputs.get(name)
        return None if output is None else output.finish_reason
