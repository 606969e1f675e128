# SPDX-License-Identifier: Apache-2.0
"""One rank of the simulated engine: a real arena, a real connector, and layers that keep books."""

from __future__ import annotations

import contextvars
import pickle
import threading
from typing import Any, NamedTuple, cast

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
from vllm.distributed.parallel_state import as_rank
from vllm.forward_context import ForwardContext
from vllm.testing.connectors.case import ContractViolation
from vllm.testing.connectors.state import GroupState, next_token
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.arena import Arena
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

#: longest time past its own limit that `wait_for_transfers` may take
_WAIT_S = 20.0


class Work(NamedTuple):
    """A request's part of a step: `num_tokens` tokens from `start` on, and the marks of all its
    tokens; `block_ids` by group."""

    name: str
    start: int
    num_tokens: int
    marks: list[int]
    block_ids: tuple[list[int], ...]


class Wrong(NamedTuple):
    """State of a request that is not what was computed for its tokens, first at `position`."""

    name: str
    rank: int
    group: int
    position: int
    block_ids: list[int]


class SimulatedWorker:
    """`rank` of `num_ranks`; each has marks of its own, so that none has another's state."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, rank: int, num_ranks: int) -> None:
        self.rank, self._num_ranks = rank, num_ranks
        self.arena = Arena(cache, torch.device("cpu"))
        self.arena.buffer[self.arena.plan.page_bytes :] = 0xFF  # NaN until written
        self.groups = [
            GroupState(group, cast(Any, self.arena.layers), rank) for group in cache.kv_cache_groups
        ]
        self._names = [list(group.layer_names) for group in cache.kv_cache_groups]
        with as_rank(rank, num_ranks):
            self.connector: KVConnectorBase_V1 = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, cache
            )
            layers = cast(dict[str, Tensor], self.arena.layers)
            memory = StateMemory(self.arena.buffer, self.arena.plan, layers)
            self.connector.register_memory(memory)
        self._slot = ConnectorSlot(self.connector)

    def step(
        self, output: SchedulerOutput, work: list[Work], pause_s: float
    ) -> tuple[ModelRunnerOutput, list[Wrong]]:
        """A step's result, and the state that it found to be wrong; `pause_s`: wait so long for a
        transfer to end."""
        context = ForwardContext(no_compile_layers={}, attn_metadata={})
        runner, wrong = KVConnectorModelRunnerMixin, []
        with as_rank(self.rank, self._num_ranks), use_slot(self._slot):
            runner.before_blocks_change(output)
            self.arena.copy_blocks(output.copies_before)
            runner.connector_reads_states(output)
            with runner.maybe_get_kv_connector_output(output, context, bool(work)) as made:
                if work:
                    wrong = self._forward(work)
                elif pause_s:
                    self._wait(pause_s)
            failed = runner.take_failed_requests()
        self.arena.copy_blocks(output.copies_after)
        sampled = {
            one.name: [next_token(one.marks[one.start + one.num_tokens - 1])]
            for one in work
            if one.name in output.sampling_req_ids
        }
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            sampled_token_ids=[sampled.get(name, []) for name in names],
            kv_connector_output=cast(KVConnectorOutput, pickle.loads(pickle.dumps(made))),
            failed_req_ids=failed,
        )
        return result, wrong

    def _forward(self, work: list[Work]) -> list[Wrong]:
        """Every layer writes its rows between its calls."""
        wrong: list[Wrong] = []
        for group, state in enumerate(self.groups):
            if state.spec.is_recurrent:
                wrong += self._find_wrong(group, work)
                self._write(group, work)
                continue
            for layer in self._names[group]:
                maybe_wait_for_layer_load(layer)
            self._write(group, work)  # requests of one step may share what it writes
            wrong += self._find_wrong(group, work)
            for layer, cache in zip(self._names[group], state.tensors(), strict=True):
                maybe_save_kv_layer(layer, cache, AttentionMetadata())
        return wrong

    def _write(self, group: int, work: list[Work]) -> None:
        for one in work:
            marks = one.marks[one.start : one.start + one.num_tokens]
            self.groups[group].write(one.block_ids[group], one.start, marks)

    def _find_wrong(self, group: int, work: list[Work]) -> list[Wrong]:
        found = []
        for one in work:
            blocks = one.block_ids[group]
            bad = self.groups[group].first_wrong(blocks, one.marks, one.start)
            if bad is not None:
                found.append(Wrong(one.name, self.rank, group, bad, blocks))
        return found

    def _wait(self, pause_s: float) -> None:
        """`wait_for_transfers` on a thread, which is left alone if it does not come back."""
        errors: list[Exception] = []

        def wait() -> None:
            try:
                self.connector.wait_for_transfers(pause_s)
            except Exception as error:
                errors.append(error)

        run = contextvars.copy_context().run
        waiting = threading.Thread(target=run, args=(wait,), daemon=True)
        waiting.start()
        waiting.join(pause_s + _WAIT_S)
        if waiting.is_alive():
            raise ContractViolation("wait-hangs", f"{pause_s} s were given")
        if errors:
            raise errors[0]
