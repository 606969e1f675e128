# SPDX-License-Identifier: Apache-2.0
"""Checks how every step uses state memory; the first misuse is an error that names it.

Blocks are NaN while they are free, so that what is read before it is written shows, and must still
be NaN when they are taken, so that what is written elsewhere shows (docs/state_memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vllm import decisions
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.arena import Arena
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.block_tags import CHECKPOINT, BlockRange, GroupTags
from vllm.v1.worker.free_memory import FreeMemory, SanitizedGroup, SanitizerError
from vllm.v1.worker.input_batch import InputBatch, RequestState, StepOrder
from vllm.v1.worker.state_probe import GroupProbe
from vllm.v1.worker.step_inputs import StepInputs

_UNWRITTEN = (
    "was not written by the step that computed it, or made of what nobody wrote, there or in a "
    "layer before"
)
_NOT_READ = (
    " although nothing the request may read is: a kernel read more than that, or the model itself "
    "computes NaN"
)


@dataclass(frozen=True)
class _Nan:
    """NaN in a request's `index`-th block; `unwritten`: it is what free blocks are filled with."""

    index: int
    block_id: int
    position: int
    layer: str
    unwritten: bool

    def read(self) -> str:
        """The problem if an earlier step had to write it."""
        what = "nothing was written there" if self.unwritten else "holds NaN"
        return f"is read, but {what} (layer {self.layer})"

    def written(self) -> str:
        """The problem if the step just run had to write it."""
        if self.unwritten:
            return f"{_UNWRITTEN} (layer {self.layer})"
        return f"is NaN (layer {self.layer}){_NOT_READ}"


@dataclass(frozen=True)
class _StepTokens:
    """A step's tokens on the host, all `[tokens]` but `sampled [samples]`, the tokens sampled from:
    which request of the step and which batch row each belongs to, its position, and whether it
    counts or makes a decode as wide as the step."""

    requests: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    real: np.ndarray
    sampled: np.ndarray

    @classmethod
    def of(cls, order: StepOrder, inputs: StepInputs) -> _StepTokens:
        lengths = order.lengths
        requests = np.repeat(np.arange(order.num_reqs), lengths)
        index = np.arange(len(requests)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = inputs.positions[: inputs.num_tokens].cpu().numpy()
        real = index < order.num_scheduled[requests]
        sampled = inputs.sample_indices.cpu().numpy()
        return cls(requests, order.rows[requests], positions, real, sampled)


class _Requests:
    """What is known of requests, whatever their placement."""

    def __init__(self) -> None:
        self.serials: dict[str, int] = {}
        self._num_serials = 0
        #: those with blocks that a connector could not load; the scheduler will undo the step
        self.undefined: set[str] = set()

    def serial(self, req_id: str) -> int:
        """The request as a writer."""
        if req_id not in self.serials:
            self._num_serials += 1
            self.serials[req_id] = self._num_serials
        return self.serials[req_id]

    def forget(self, req_id: str) -> None:
        self.serials.pop(req_id, None)
        self.undefined.discard(req_id)


class Sanitizer:
    """One worker's checks of the steps of one placement; they wait for the device in every step.

    `first_group`: how many groups the placements before have; `beside`: another placement's.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        arena: Arena,
        tables: BlockTables,
        batch: InputBatch,
        first_group: int = 0,
        beside: Sanitizer | None = None,
    ) -> None:
        self._tables, self._batch = tables, batch
        self._groups = [
            SanitizedGroup(
                f"group {first_group + i} ({group.kv_cache_spec.kind}: "
                f"{_names(group.layer_names)})",
                arena,
                i,
                group.kv_cache_spec,
                GroupTags(arena.plan.num_blocks(i), plan.blocks_per_page, *table.table.shape),
                GroupProbe(arena, group, plan),
            )
            for i, (group, plan, table) in enumerate(
                zip(config.kv_cache_groups, arena.plan.groups, tables.groups, strict=True)
            )
        ]
        self.memory: FreeMemory = FreeMemory(arena) if beside is None else beside.memory
        self.memory.set_groups(first_group, self._groups)
        self._requests: _Requests = _Requests() if beside is None else beside._requests
        self._arrived: list[str] = []
        self._nan_tokens: Tensor | None = None
        self._nan_samples: Tensor | None = None
        decisions.record(
            "sanitizer",
            "on",
            "--sanitize or VLLM_SANITIZE=1: every step waits for the device and is checked",
        )

    # ---- before the forward pass ---------------------------------------------------------------

    def begin_step(self, output: SchedulerOutput) -> None:
        """Do what the scheduler did since the last step, copies included, in its order; take in
        the block lists. The batch knows the step's requests already."""
        self.memory.replay(output.block_log or [])
        for copy in output.copies_after:
            group = self._groups[copy.group_id]
            self.memory.check_copy(group, copy)
            group.tags.writer[copy.target] = CHECKPOINT
        self._arrived.clear()
        for req_id in output.finished_req_ids:
            self._requests.forget(req_id)
        for new in output.scheduled_new_reqs:
            self._attach(new.req_id, new.block_ids, replace=True)
        cached = output.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                self._attach(req_id, block_ids, replace=req_id in cached.resumed_req_ids)
        if output.kv_connector_metadata is None:
            self._check_arrived(recurrent=True)

    def _attach(self, req_id: str, block_ids: tuple[list[int], ...], replace: bool) -> None:
        state = self._batch.requests[req_id]
        serial = self._requests.serial(req_id)
        if replace:
            self._requests.undefined.discard(req_id)
            self._arrived.append(req_id)
        for group, ids in zip(self._groups, block_ids, strict=True):
            start = 0 if replace else int(group.tags.count[state.row])
            # What is computed already was found in the cache or comes from a connector.
            own = (
                0 if group.spec.is_recurrent else state.num_computed_tokens // group.spec.block_size
            )
            clash = group.tags.attach(state.row, start, np.array(ids, dtype=np.int64), own, serial)
            if clash is not None:
                index, writer = clash
                problem = f"is given to it to write, but it is {self._writer_name(writer)}'s"
                raise self._error(req_id, group, ids[index - start], index, problem)

    def _writer_name(self, writer: int) -> str:
        if writer == CHECKPOINT:
            return "a checkpoint"
        names = {serial: req_id for req_id, serial in self._requests.serials.items()}
        return f"request {names[writer]}" if writer in names else "an ended request"

    def check_inputs(self, order: StepOrder, inputs: StepInputs) -> None:
        """Compare the uploaded block tables and slots with what each request may use."""
        tokens = _StepTokens.of(order, inputs)
        serials = np.array(
            [self._requests.serials[req_id] for req_id in order.req_ids], dtype=np.int32
        )
        ends = order.num_computed + order.num_scheduled
        padded_rows = len(inputs.seq_lens)
        for group, table in zip(self._groups, self._tables.groups, strict=True):
            size = group.spec.block_size
            if group.spec.is_recurrent:
                zeros, ones = np.zeros_like(ends), np.ones_like(ends)
                used = BlockRange(order.rows, serials, zeros, zeros, ones)
            else:
                first = group.first_visible(order.num_computed) // size
                written, end = order.num_computed // size, -(-ends // size)
                used = BlockRange(order.rows, serials, first, written, end)
            uploaded = table.staged.device[:padded_rows].cpu().numpy()
            bad = group.tags.misuse(used, uploaded[: order.num_reqs])
            if bad is not None:
                req_id = order.req_ids[bad.request]
                raise self._error(req_id, group, bad.block_id, bad.index, bad.problem)
            if (uploaded[order.num_reqs :, 0] != -1).any():
                raise SanitizerError(f"{group.name}: a padded row has a block")
            if not group.spec.is_recurrent:
                self._check_slots(group, order, inputs, tokens, table.slots)

    def _check_slots(
        self,
        group: SanitizedGroup,
        order: StepOrder,
        inputs: StepInputs,
        tokens: _StepTokens,
        slots: Tensor,
    ) -> None:
        uploaded = slots[: inputs.num_padded].cpu().numpy()
        size = group.spec.block_size
        expected = group.tags.slots(tokens.rows, tokens.positions, size)
        found = uploaded[: inputs.num_tokens]
        wrong = np.flatnonzero((found != expected) & (tokens.real | (found != -1)))
        if len(wrong):
            token = int(wrong[0])
            req_id = order.req_ids[int(tokens.requests[token])]
            block_id, position = int(expected[token]) // size, int(tokens.positions[token])
            problem = (
                f"belongs in slot {int(expected[token])} but is written to {int(found[token])}"
            )
            raise self._error(req_id, group, block_id, position // size, problem, position)
        if (uploaded[inputs.num_tokens :] != -1).any():
            raise SanitizerError(f"{group.name}: a padded token has a slot")

    # ---- after the forward pass ----------------------------------------------------------------

    def observe(self, hidden: Tensor | None, logits: Tensor | None) -> None:
        """Remember which rows of the model's outputs are NaN, before sampling changes them.

        `hidden [tokens, ...]`, unless a graph ran; `logits [rows, vocab]`, on a pipeline stage with
        the head.
        """
        self._nan_tokens = None if hidden is None else hidden.isnan().flatten(1).any(-1)
        self._nan_samples = None if logits is None else logits.isnan().any(-1)

    def end_step(
        self, order: StepOrder, inputs: StepInputs, transfers: KVConnectorOutput | None
    ) -> None:
        """Raise if the step wrote to the null page, or wrote or computed NaN."""
        if not self.memory.null_page_is_clear():
            raise SanitizerError(
                f"the null page was written to in a step of requests {', '.join(order.req_ids)}"
            )
        if transfers is not None:
            self._exempt(order, transfers)
        self._check_arrived(recurrent=False)
        tokens = _StepTokens.of(order, inputs)
        suspects = self._nan_outputs(order, tokens) | self._nan_writes(order, tokens)
        for i in np.flatnonzero(suspects).tolist():
            if order.req_ids[i] not in self._requests.undefined:
                raise self._explain(order, i)

    def _exempt(self, order: StepOrder, transfers: KVConnectorOutput) -> None:
        for index, group in enumerate(self._groups):
            invalid = transfers.invalid_block_ids | {
                block for of, block in transfers.invalid_blocks if of == index
            }
            if not invalid:
                continue
            for req_id, row in zip(order.req_ids, order.rows.tolist(), strict=True):
                if not invalid.isdisjoint(group.tags.ids[row, : group.tags.count[row]].tolist()):
                    self._requests.undefined.add(req_id)

    def _nan_outputs(self, order: StepOrder, tokens: _StepTokens) -> np.ndarray:
        bad = np.zeros(order.num_reqs, dtype=bool)
        if self._nan_tokens is not None:
            bad[tokens.requests[self._nan_tokens.cpu().numpy() & tokens.real]] = True
        if self._nan_samples is not None:
            nan = self._nan_samples.cpu().numpy() & tokens.real[tokens.sampled]
            bad[tokens.requests[tokens.sampled[nan]]] = True
        return bad

    def _nan_writes(self, order: StepOrder, tokens: _StepTokens) -> np.ndarray:
        bad = np.zeros(order.num_reqs, dtype=bool)
        rows, positions = tokens.rows[tokens.real], tokens.positions[tokens.real]
        for group in self._groups:
            if group.spec.is_recurrent:
                bad |= group.probe.nan_states(group.tags.ids[order.rows, 0])
            else:
                blocks = group.tags.ids[rows, positions // group.spec.block_size]
                found = group.probe.nan_tokens(blocks, positions % group.spec.block_size)
                bad[tokens.requests[tokens.real][found]] = True
        return bad

    def _check_arrived(self, recurrent: bool) -> None:
        """Requests that start with computed tokens: are they all there?

        Recurrent states are looked at before the forward pass, which moves them on (not if a
        connector may load them during it); the others after it, since requests of one step share
        what it computes.
        """
        for req_id in self._arrived:
            state = self._batch.requests[req_id]
            if req_id in self._requests.undefined or not state.num_computed_tokens:
                continue
            for group in self._groups:
                if group.spec.is_recurrent is recurrent:
                    bad = self._first_nan(group, state, state.num_computed_tokens)
                    if bad is not None:
                        raise self._error(req_id, group, bad.block_id, bad.index, bad.read(), bad)

    def _first_nan(
        self, group: SanitizedGroup, state: RequestState, num_tokens: int
    ) -> _Nan | None:
        """The first NaN in what a token after `num_tokens` tokens may read."""
        if group.spec.is_recurrent:
            block_id = int(group.tags.ids[state.row, 0])
            if not group.probe.nan_states(np.array([block_id])).any():
                return None
            return _Nan(0, block_id, num_tokens - 1, *group.probe.first_nan(block_id, 0))
        size = group.spec.block_size
        first = int(group.first_visible(np.array([num_tokens]))[0])
        positions = np.arange(first, num_tokens)
        blocks = group.tags.ids[state.row, positions // size]
        found = np.flatnonzero(group.probe.nan_tokens(blocks, positions % size))
        if not len(found):
            return None
        block_id, position = int(blocks[found[0]]), int(positions[found[0]])
        layer, unwritten = group.probe.first_nan(block_id, position % size)
        return _Nan(position // size, block_id, position, layer, unwritten)

    # ---- what to say ---------------------------------------------------------------------------

    def _explain(self, order: StepOrder, i: int) -> SanitizerError:
        """Why a request has NaN: the first bad thing it read, or what its step failed to write."""
        state = order.states[i]
        computed = int(order.num_computed[i])
        end = computed + int(order.num_scheduled[i])
        for group in self._groups:
            if not group.spec.is_recurrent:
                bad = self._first_nan(group, state, computed)
                if bad is not None:
                    return self._error(
                        state.req_id, group, bad.block_id, bad.index, bad.read(), bad
                    )
        written = [(group, self._first_nan(group, state, end)) for group in self._groups]
        found = [(group, bad) for group, bad in written if bad is not None]
        for group, bad in sorted(found, key=lambda pair: not pair[1].unwritten):
            return self._error(state.req_id, group, bad.block_id, bad.index, bad.written(), bad)
        return SanitizerError(
            f"request {state.req_id}, tokens {computed} to {end - 1}: hidden states or logits are "
            f"NaN{_NOT_READ}"
        )

    def _error(
        self,
        req_id: str,
        group: SanitizedGroup,
        block_id: int,
        index: int,
        problem: str,
        at: _Nan | int | None = None,
    ) -> SanitizerError:
        """`index`: which of the request's blocks; `at`: the token, if it is known."""
        position = at.position if isinstance(at, _Nan) else at
        if group.spec.is_recurrent:
            where = "the state" if position is None else f"the state after token {position}"
        elif position is None:
            first = index * group.spec.block_size
            where = f"tokens {first} to {first + group.spec.block_size - 1}"
        else:
            where = f"token {position}"
        generation = int(group.tags.generation[block_id])
        return SanitizerError(
            f"request {req_id}, {group.name}, block {block_id} (generation {generation}), "
            f"{where}: {problem}"
        )


def _names(layer_names: list[str]) -> str:
    if not layer_names:
        return "of other pipeline stages"
    if len(layer_names) == 1:
        return layer_names[0]
    return f"{layer_names[0]} to {layer_names[-1]}, {len(layer_names)} layers"
