# SPDX-License-Identifier: Apache-2.0
"""Which recurrent states wait in a journal, and writing them to their blocks before anyone looks.

A decode step of a layer that `KeepsJournal` reads the state and leaves its updates in the journal
of the request's batch row; every few steps it writes the state with them. Everything else that
reads or moves a state block finds it complete: a row is flushed before its block is copied, before
a prefill continues it and when its request leaves the batch. The host says when and orders it by
the stream; how many tokens are pending, drafts that were accepted among them, the device counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.kernels.journal import Journal, JournalMemory, JournalShape, JournalStack
from vllm.kernels.step import JournalCommits, Progress
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, KeepsJournal
from vllm.v1.core.sched.output import BlockCopy
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.worker.block_tables import BlockTables
from vllm.v1.worker.input_batch import StepOrder
from vllm.v1.worker.journal_pool import JournalPool, count_journals
from vllm.v1.worker.staging import StagedArray

#: places in a step where rows may be flushed
_FLUSHES_PER_STEP = 3


@dataclass(frozen=True)
class _JournalGroup:
    """One group's layers and their journals; `stack`, and `journals` with a part of it for each
    layer, once the states have memory."""

    group_id: int
    layers: list[KeepsJournal]
    memory: JournalMemory
    stack: JournalStack | None = None
    journals: list[Journal] = field(default_factory=list)


class StateJournals:
    """The journals of one placement's layers, in the memory of a pool.

    A row commits at least every `interval` tokens, rows in turn so that steps cost the same. `bind`
    follows every new arena.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, list[KeepsJournal], JournalShape]],
        progress: Progress,
        pool: JournalPool,
        interval: int,
        depth: int,
    ) -> None:
        assert pool.size is not None
        rows, device = len(progress.pending), progress.pending.device
        #: rows in which tokens may be pending
        self.waiting = np.zeros(rows, dtype=bool)
        self._progress, self._size, self._interval = progress, pool.size, interval
        self._turn = 0
        self._steps = torch.zeros(rows, 4, dtype=torch.int32, device=device)
        copies = depth * _FLUSHES_PER_STEP * len(groups)
        self._entries = StagedArray((rows, 2), torch.int32, device, copies)
        self._left: list[tuple[int, list[int]]] = []
        #: rows that left, and after how many tokens their state is kept
        self._kept: list[tuple[int, int]] = []
        parts = pool.parts([(shape, len(layers)) for _, layers, shape in groups])
        self._groups = [
            _JournalGroup(group_id, layers, memory)
            for (group_id, layers, _), memory in zip(groups, parts, strict=True)
        ]

    @classmethod
    def create(
        cls,
        vllm_config: VllmConfig,
        layers: Mapping[str, AttentionLayerBase],
        config: KVCacheConfig,
        progress: Progress,
        depth: int,
        pool: JournalPool,
    ) -> StateJournals | None:
        """None where there is nothing to keep (see `JournalSize.of`), or no room for it in the
        pool. ValueError for drafts beside a recurrent layer without a journal, whose state could
        not take back a rejected one, and for kinds of layers with journals in one group."""
        groups = []
        for group_id, group in enumerate(config.kv_cache_groups):
            members = [layers[name] for name in group.layer_names]
            keeping = [layer for layer in members if isinstance(layer, KeepsJournal)]
            recurrent = group.kv_cache_spec.is_recurrent
            without = [n for n in group.layer_names if not isinstance(layers[n], KeepsJournal)]
            if recurrent and without and vllm_config.tokens_to_verify > 1:
                kind = type(layers[without[0]]).__name__
                raise VLLMValidationError(
                    f"{without[0]}: {kind} layers keep no journal, so drafts cannot be "
                    "verified; leave --speculative-config out"
                )
            for name in group.layer_names:
                _check_same_journal(name, keeping, layers[name])
            if keeping:
                spec = MambaSpec.expect(group.kv_cache_spec)
                groups.append((group_id, keeping, keeping[0].journal_shape(spec)))
        if pool.size is None or not groups:
            return None
        if not pool.has_room_for(count_journals(vllm_config, layers)):
            return None
        return cls(groups, progress, pool, vllm_config.cache_config.commit_interval, depth)

    @property
    def tensors(self) -> list[Tensor]:
        """The journals' memory."""
        return [tensor for group in self._groups for tensor in group.memory.tensors]

    def bind(self, tables: BlockTables, reset: bool = True) -> None:
        """Use the states that the layers have now; nothing is pending in them. Without `reset`
        rows of other placements may have something pending."""
        self.waiting[:] = False
        self._turn = 0
        self._left.clear()
        self._kept.clear()
        progress = self._progress
        counts = (progress.pending, progress.first, progress.taken)
        for count in counts if reset else ():
            count.zero_()
        self._tables = [tables.groups[group.group_id].table for group in self._groups]
        for i, group in enumerate(self._groups):
            conv_states = [layer.kv_cache[0] for layer in group.layers]
            states = [layer.kv_cache[1] for layer in group.layers]
            rates = [layer.journal_log_rates() for layer in group.layers]
            stack = group.memory.stack(
                self._steps,
                counts,
                states,
                conv_states,
                [each for each in rates if each is not None],
            )
            journals = [stack.layer(index) for index in range(len(group.layers))]
            self._groups[i] = replace(group, stack=stack, journals=journals)
        self.attach()

    def attach(self) -> None:
        """Let the layers keep these journals; where placements share layers, before each step."""
        for group in self._groups:
            for layer, journal in zip(group.layers, group.journals, strict=True):
                layer.journal = journal

    def unbind(self) -> None:
        """The states' memory is given up."""
        for i, group in enumerate(self._groups):
            self._groups[i] = replace(group, stack=None, journals=[])
            for layer in group.layers:
                layer.journal = None

    # ---- around a step -------------------------------------------------------------------------

    def leave(self, row: int, num_kept_tokens: int | None = None) -> None:
        """A request gives up its row; its state is flushed before anything else runs, with
        `num_kept_tokens` of its tokens if given: what its last step accepted may be left out."""
        if self.waiting[row]:
            if num_kept_tokens is not None:
                self._kept.append((row, num_kept_tokens))
            self._left.append((row, [int(table[row, 0]) for table in self._tables]))
            self.waiting[row] = False

    def before_copies(self, copies: Sequence[BlockCopy]) -> None:
        """Flush the requests that left and the rows whose blocks are about to be copied."""
        left, self._left = self._left, []
        self._leave_out_drafts()
        copied = np.zeros(len(self.waiting), dtype=bool)
        for i, group in enumerate(self._groups):
            sources = [copy.source for copy in copies if copy.group_id == group.group_id]
            if sources:
                copied |= np.isin(self._tables[i][:, 0], sources)
        rows = np.flatnonzero(copied & self.waiting)
        self._flush(left + self._take(rows))
        if len(rows):
            # They may go on where only the device knows how far they are.
            self._forget(rows)

    def _leave_out_drafts(self) -> None:
        """Of the rows that left, what is pending past the tokens whose state is kept does not
        count; these are accepted drafts of the row's last step."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        progress = self._progress
        table = torch.tensor(kept, dtype=torch.int32)
        if progress.pending.is_cuda:
            table = table.pin_memory().to(progress.pending.device, non_blocking=True)
        rows, ends = table.unbind(1)
        past = (progress.computed.index_select(0, rows) - ends).clamp_(min=0)
        for count in (progress.pending, progress.taken):
            count.index_add_(0, rows, -past)

    def begin_step(self, order: StepOrder, commit_all: bool = False) -> JournalCommits:
        """Flush rows whose progress the host gives, which start anew; when the others commit: in
        turn, or with `commit_all` in this step, before which idle rows are flushed, too."""
        given = order.rows[order.num_computed < order.num_known]
        rows = given[self.waiting[given]]
        idle = rows[:0]
        if commit_all:
            idle = np.setdiff1d(np.flatnonzero(self.waiting), order.rows)
        self._flush(self._take(np.concatenate((rows, idle))))
        if len(idle):
            self._forget(idle)
        self.waiting[order.rows[: order.num_decodes]] = True
        self._turn += 1
        return self._commits(1 if commit_all else self._interval)

    def complete_all(self) -> None:
        """Flush every row: no step runs, and somebody is about to look."""
        rows = np.flatnonzero(self.waiting)
        self._flush(self._take(rows))
        if len(rows):
            self._forget(rows)

    def no_step(self) -> JournalCommits:
        """For a step of padding."""
        return self._commits(self._interval)

    def _commits(self, interval: int) -> JournalCommits:
        size = self._size
        return JournalCommits(self._steps, size.places, size.most_pending, interval, self._turn)

    def rehearse(self) -> None:
        """Launch a flush that has nothing to write (warm-up: its kernel is compiled)."""
        for group in self._groups:
            assert group.stack is not None
            self._entries.next()[:1] = 0
            group.layers[0].commit(group.stack, self._entries.upload(1))

    def _take(self, rows: np.ndarray) -> list[tuple[int, list[int]]]:
        """These rows and their blocks; nothing waits in them any more."""
        self.waiting[rows] = False
        return [(row, [int(table[row, 0]) for table in self._tables]) for row in rows.tolist()]

    def _flush(self, rows: list[tuple[int, list[int]]]) -> None:
        """One launch per group; made-up requests, whose block is null, have nothing to keep."""
        for i, group in enumerate(self._groups):
            real = [(row, blocks[i]) for row, blocks in rows if blocks[i] > 0]
            if real:
                assert group.stack is not None
                self._entries.next()[: len(real)] = real
                group.layers[0].commit(group.stack, self._entries.upload(len(real)))

    def _forget(self, rows: np.ndarray) -> None:
        """Nothing is pending in flushed rows that go on."""
        progress = self._progress
        index = torch.from_numpy(rows)
        if progress.pending.is_cuda:
            index = index.pin_memory().to(progress.pending.device, non_blocking=True)
        for count in (progress.pending, progress.first, progress.taken):
            count.index_fill_(0, index, 0)


def _check_same_journal(
    name: str, keeping: Sequence[KeepsJournal], layer: AttentionLayerBase
) -> None:
    """The first layer's `commit` writes what all of its group have pending."""
    if not isinstance(layer, KeepsJournal) or type(layer).commit == type(keeping[0]).commit:
        return
    kinds = f"{type(keeping[0]).__name__} and {type(layer).__name__}"
    raise VLLMValidationError(
        f"{name}: {kinds} layers keep equal states but write them with different ops; give each "
        "kind a `mamba_type` of its own"
    )
