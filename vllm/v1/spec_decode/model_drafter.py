# SPDX-License-Identifier: Apache-2.0
"""A drafter that is a smaller model of the same vocabulary.

After each step it runs over all tokens that the target ran, as they are, and then token by token
from each row's newest one. What it kept of rejected drafts lies in slots that are written again;
recurrent states are never told of them (`DraftStates`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from vllm.config.draft_methods.draft_model import DraftModelSettings
from vllm.forward_context import set_forward_context
from vllm.kernels.step import Progress
from vllm.model_executor.layers.attention_layer_base import KeepsJournal
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base import initialize_model, set_default_torch_dtype
from vllm.model_executor.models.draft_logits import DraftLogits
from vllm.model_executor.models.interfaces import VllmModel
from vllm.model_executor.state_layers import modules_in_use
from vllm.v1.spec_decode.draft_loop import DraftRows
from vllm.v1.spec_decode.drafter import DrafterMemory
from vllm.v1.spec_decode.layer_drafter import LayerDrafter
from vllm.v1.worker.step_inputs import StepInputs

_PREFIX = "draft"


class ModelDrafter(LayerDrafter[DraftModelSettings]):
    """Its layers are named `draft.*`."""

    model: nn.Module

    def _new_model(self, target: nn.Module) -> nn.Module:
        config = copy.copy(self.vllm_config)
        config.model_config, config.quant_config = self.settings.draft, None
        with torch.no_grad(), set_default_torch_dtype(config.model_config.dtype), self.device:
            self.model = initialize_model(config, prefix=_PREFIX)
        self.logits = DraftLogits.of_model(cast(VllmModel, self.model))
        self.states = DraftStates(self.model, self.progress)
        return self.model

    def bind(self, memory: DrafterMemory) -> None:
        super().bind(memory)
        self.states.bind(memory)

    def load_weights(self) -> None:
        loader = get_model_loader(self.vllm_config.load_config)
        loader.fill(self.model, self.settings.draft)

    def observe(self, inputs: StepInputs, hidden: Tensor, residual: Sequence[Tensor]) -> None:
        self.states.observe()

    def _keep(self, inputs: StepInputs) -> None:
        self.states.begin_step()
        cast(VllmModel, self.model).forward(inputs.input_ids, inputs.positions)

    def _draft(self, inputs: StepInputs, num_reqs: int, num_drafts: int) -> Tensor:
        self._keep(inputs)
        model = cast(VllmModel, self.model)
        rows = self.loop.begin(inputs, num_reqs)
        token = self.progress.tokens[:, 0].index_select(0, rows.rows.clamp(min=0))
        drafts = []
        with set_forward_context(rows.context), self.states.drafting(rows):
            for ahead in range(num_drafts):
                self.states.place(rows, ahead)
                hidden = model.forward(token, self.loop.place(rows, ahead))
                token = self.logits.best(self.logits(hidden))
                drafts.append(token)
        return self.loop.keep(rows, drafts)


class DraftStates:
    """Recurrent states of the layers of `model` that keep a journal; without any, nothing is done.

    Of a step's tokens the layers journal what the target's layers journal, in the same places, so
    what is accepted of them counts for both (`vllm.kernels.journal`). They run when that has been
    decided already, so they are told what was known before. Drafts go on from there: each leaves
    its update in the places after those that are pending, where the next step's tokens write
    theirs, and what they did to the convolutions is taken back. Nothing of a draft is ever written
    to a state.
    """

    def __init__(self, model: nn.Module, progress: Progress) -> None:
        modules = (module for _, module in modules_in_use(model))
        self._layers = {
            layer.layer_name: layer for layer in modules if isinstance(layer, KeepsJournal)
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
            for state, kept in zip(states, copies, strict=True):
                state.index_copy_(0, blocks, kept)

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
