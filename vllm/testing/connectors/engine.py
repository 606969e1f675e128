# SPDX-License-Identifier: Apache-2.0
"""An engine with a real scheduler, a real arena and a real connector, and a model that only keeps
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
from typing import Any, cast

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    StateMemory,
)
from vllm.distributed.kv_transfer.kv_transfer_state import (
    ConnectorSlot,
    maybe_save_kv_layer,
    maybe_wait_for_layer_load,
    use_slot,
)
from vllm.forward_context import ForwardContext
from vllm.sampling_params import SamplingParams
from vllm.testing.connectors.case import ConnectorCase, ContractViolation
from vllm.testing.connectors.layouts import LAYOUTS, make_config
from vllm.testing.connectors.state import GroupState, marks_of, next_token
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import AttentionMetadata
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
from vllm.v1.engine import EngineCoreOutput, FinishReason, RequestFailure
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.arena import Arena
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

#: longest wait for transfers
_SETTLE_S = 20.0


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
    return get_kv_cache_configs(config, [LAYOUTS[kind]], [pages * plan.page_bytes])[0]


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
            **settings,
        )
        cache = _memory(self.config, kind, room)
        self.arena = Arena(cache, torch.device("cpu"))
        self.arena.buffer[self.arena.plan.page_bytes :] = 0xFF  # NaN until written
        self._groups = [
            GroupState(group, cast(Any, self.arena.layers)) for group in cache.kv_cache_groups
        ]
        self._names = [list(group.layer_names) for group in cache.kv_cache_groups]
        self.worker: KVConnectorBase_V1 = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, cache
        )
        layers = cast(dict[str, Tensor], self.arena.layers)
        self.worker.register_memory(StateMemory(self.arena.buffer, self.arena.plan, layers))
        self._slot = ConnectorSlot(self.worker)
        self.scheduler = Scheduler(self.config, cache)
        connector = self.scheduler.get_kv_connector()
        assert connector is not None
        self.connector = connector
        handshake = self.worker.get_handshake_metadata()
        if handshake is not None:
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        init_none_hash(sha256, connector.get_prefix_hash_root())
        self._hasher = get_request_block_hasher(16, sha256)
        self._report_delay = report_delay
        self._late: list[tuple[int, KVConnectorOutput]] = []
        self._num_steps = 0
        self._num_requests = 0
        self.outputs: dict[str, EngineCoreOutput] = {}
        self.tokens: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

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
        deadline = time.monotonic() + _SETTLE_S
        while self.scheduler.has_requests() or self._late:
            if not self.step():
                time.sleep(0.0005)
            if time.monotonic() > deadline:
                waiting = sorted(self.scheduler.requests)
                pushes = self.connector.has_pending_push_work()
                raise ContractViolation(
                    "never-settles", f"requests {waiting} are left, pending push work: {pushes}"
                )

    def step(self) -> int:
        """One step; the number of its tokens."""
        self._num_steps += 1
        output = self._schedule()
        result = self._run(output)
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

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The worker's part of a step."""
        context = ForwardContext(no_compile_layers={}, attn_metadata={})
        runner, computes = KVConnectorModelRunnerMixin, output.total_num_scheduled_tokens > 0
        sampled: dict[str, list[int]] = {}
        wrong: list[tuple[str, int, int, set[tuple[int, int]]]] = []
        with use_slot(self._slot), self._calling("step"):
            runner.before_blocks_change(output)
            self.arena.copy_blocks(output.copies_before)
            runner.connector_reads_states(output)
            with runner.maybe_get_kv_connector_output(output, context, computes) as made:
                if computes:
                    self._forward(output, sampled, wrong)
            failed = runner.take_failed_requests()
        report = cast(KVConnectorOutput, pickle.loads(pickle.dumps(made)))
        self._check_state(wrong, report, failed)
        self.arena.copy_blocks(output.copies_after)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            sampled_token_ids=[sampled.get(name, []) for name in names],
            kv_connector_output=report,
            failed_req_ids=failed,
        )

    def _forward(
        self,
        output: SchedulerOutput,
        sampled: dict[str, list[int]],
        wrong: list[tuple[str, int, int, set[tuple[int, int]]]],
    ) -> None:
        """Every layer writes its rows between its calls; notes state that is not what it should
        be."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        manager = self.scheduler.kv_cache_manager
        steps = []
        for name, count in output.num_scheduled_tokens.items():
            marks = marks_of(self.requests[name].all_token_ids)
            steps.append((name, computed[name], count, marks, manager.get_block_ids(name)))
        for group, state in enumerate(self._groups):
            if not state.spec.is_recurrent:
                for layer in self._names[group]:
                    maybe_wait_for_layer_load(layer)
            if not state.spec.is_recurrent:  # requests of one step may share what it writes
                for _, start, count, marks, block_ids in steps:
                    state.write(block_ids[group], start, marks[start : start + count])
            for name, start, _, marks, block_ids in steps:
                blocks = block_ids[group]
                bad = state.first_wrong(blocks, marks, start)
                if bad is not None:
                    wrong.append((name, group, bad, {(group, block) for block in blocks}))
            if state.spec.is_recurrent:
                for _, start, count, marks, block_ids in steps:
                    state.write(block_ids[group], start, marks[start : start + count])
            if not state.spec.is_recurrent:
                for layer, cache in zip(self._names[group], state.tensors(), strict=True):
                    maybe_save_kv_layer(layer, cache, AttentionMetadata())
        for name, start, count, marks, _ in steps:
            if name in output.sampling_req_ids:
                sampled[name] = [next_token(marks[start + count - 1])]

    def _check_state(
        self,
        wrong: list[tuple[str, int, int, set[tuple[int, int]]]],
        report: KVConnectorOutput,
        failed: dict[str, Any],
    ) -> None:
        """Wrong state is fine only if the connector says so: the scheduler undoes the step."""
        for name, group, position, blocks in wrong:
            ids = {block for _, block in blocks}
            if blocks & report.invalid_blocks or ids & report.invalid_block_ids or name in failed:
                continue
            whose = self.scheduler.requests.get(name)
            if whose is not None and self._is_failing(name, report):
                continue
            raise ContractViolation(
                "wrong-bits",
                f"request {name}, state group {group} ({self._groups[group].spec.kind}), "
                f"token {position}",
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
        return case.damage(self.connector, self.worker, self.storage, how)

    def check_nothing_left(self) -> None:
        """After `settle`: nobody holds a block."""
        manager, transfer = self.scheduler.kv_cache_manager, self.scheduler.transfer
        assert transfer is not None
        held = manager.usage, transfer.loading, transfer.received, transfer.sending
        if any(held):
            raise ContractViolation("blocks-leaked", f"usage and transfers: {held}")

    def shutdown(self) -> None:
        with self._calling("shutdown"):
            self.worker.shutdown()
            self.scheduler.shutdown()

    def reason(self, name: str) -> FinishReason | None:
        output = self.outputs.get(name)
        return None if output is None else output.finish_reason
