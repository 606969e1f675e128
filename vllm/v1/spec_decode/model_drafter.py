# SPDX-License-Identifier: Apache-2.0
"""A drafter that is a smaller model of the same vocabulary.

After each step it runs over all tokens that the target ran, as they are, and then token by token
from each row's newest one. What it kept of rejected drafts lies in slots that are written again;
recurrent states are never told of them (`DraftStates`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from vllm.config.draft_methods.draft_model import DraftModelSettings
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base import initialize_model, set_default_torch_dtype
from vllm.model_executor.models.interfaces import VllmModel
from vllm.v1.spec_decode.draft_states import DraftStates
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

    def _draft(self, inputs: StepInputs, num_reqs: int, num_drafts: int) -> Tensor:
        model = cast(VllmModel, self.model)
        self.states.begin_step()
        model.forward(inputs.input_ids, inputs.positions)
        if not num_drafts:
            return self._none(num_reqs)
        rows = self.loop.begin(inputs, num_reqs)
        token = self.progress.tokens[:, 0].index_select(0, rows.rows.clamp(min=0))
        drafts = []
        with set_forward_context(rows.context), self.states.drafting(rows):
            for ahead in range(num_drafts):
                self.states.place(rows, ahead)
                hidden = model.forward(token, self.loop.place(rows, ahead))
                token = model.compute_logits(hidden).argmax(dim=-1)
                drafts.append(token)
        return self.loop.keep(rows, drafts)
