# SPDX-License-Identifier: Apache-2.0
"""Recurrent states of a draft model: kept like the target's, and untouched by its own drafts.

Of a step's tokens the layers journal what the target's layers journal, in the same places, so what
is accepted of them counts for both (`vllm.kernels.journal`). They run when that has been decided
already, so they are told what was known before. Drafts go on from there: each leaves its update in
the places after those that are pending, where the next step's tokens write theirs, and what they
did to the convolutions is taken back. Nothing of a draft is ever written to a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from vllm.kernels.step import Progress
from vllm.model_executor.layers.attention_layer_base import KeepsJournal
from vllm.v1.spec_decode.draft_loop import DraftRows
from vllm.v1.spec_decode.drafter import DrafterMemory


class DraftStates:
    """Of the layers of `model` that keep a journal; without any, nothing is done."""

    def __init__(self, model: nn.Module, progress: Progress) -> None:
        self._layers = {
            layer.layer_name: layer for layer in model.modules() if isinstance(layer, KeepsJournal)
        }
        self._progress = progress
        rows, device = len(progress.pending), progress.pending.device
        #: what the layers read: see `Journal`
        self._steps = torch.zeros(rows, 4, dtype=torch.int32, device=device)
        self._taken = torch.zeros(rows, dtype=torch.int32, device=device)

    def bind(self, memory: DrafterMemory) -> None:
        """The layers have got their memory and their journals."""
        #: by group, its block table and the layers' convolution states
        self._convolved: list[tuple[Tensor, list[Tensor]]] = []
        for index, group in enumerate(memory.kv_cache_config.kv_cache_groups):
            layers = [self._layers[n] for n in group.layer_names if n in self._layers]
            if not layers:
                continue
            table = memory.block_tables.groups[index].staged.device
            self._convolved.append((table, [layer.kv_cache[0] for layer in layers]))
            for layer in layers:
                assert layer.journal is not None, "rows that verify drafts keep a journal"
                self._prepared = layer.journal.steps
                layer.journal = replace(layer.journal, steps=self._steps, taken=self._taken)

    # ---- a step, in this order -----------------------------------------------------------------

    def observe(self) -> None:
        """While the target runs: what was accepted of the step before."""
        if self._layers:
            self._taken.copy_(self._progress.taken)

    def begin_step(self) -> None:
        """Before the layers run over the step's tokens."""
        if self._layers:
            self._steps.copy_(self._prepared)

    @contextmanager
    def drafting(self, rows: DraftRows) -> Iterator[None]:
        """Call `place` before each draft of `rows` inside."""
        count = len(rows.rows)
        saved = []
        for table, states in self._convolved:
            blocks = table[:count, 0].clamp(min=0).long()
            saved.append((blocks, [state.index_select(0, blocks) for state in states]))
        self._taken.copy_(self._progress.taken)
        yield
        for (_, states), (blocks, copies) in zip(self._convolved, saved, strict=True):
            for state, copy in zip(states, copies, strict=True):
                state.index_copy_(0, blocks, copy)

    def place(self, rows: DraftRows, ahead: int) -> None:
        """The rows' next tokens lie `ahead` after those that are computed."""
        if not self._layers:
            return
        row = rows.rows.clamp(min=0)
        pending = self._progress.pending.index_select(0, row) + ahead
        first = self._progress.first.index_select(0, row)
        steps = self._steps[: len(row)]
        steps[:, 0], steps[:, 1], steps[:, 3] = row, pending, first
        steps[:, 2].fill_(0)
        if ahead:
            # The convolutions have taken these in with the first draft.
            self._taken.zero_()
