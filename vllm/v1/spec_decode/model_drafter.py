# SPDX-License-Identifier: Apache-2.0
"""A drafter that is a smaller model of the same vocabulary, with attention layers only.

After each step it runs over all tokens that the target ran, as they are, and then token by token
from each row's newest one. What it kept of rejected drafts lies in slots that are written again.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.config.draft_methods.draft_model import DraftModelSettings
from vllm.forward_context import set_forward_context
from vllm.kernels.step import Progress
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base import initialize_model, set_default_torch_dtype
from vllm.model_executor.models.interfaces import VllmModel, is_hybrid
from vllm.v1.spec_decode.draft_loop import DraftLoop, layer_names
from vllm.v1.spec_decode.drafter import Drafter, DrafterMemory, DraftStep

_PREFIX = "draft"


class ModelDrafter(Drafter[DraftModelSettings]):
    """Its layers are named `draft.*`."""

    def __init__(
        self, vllm_config: VllmConfig, settings: DraftModelSettings, progress: Progress
    ) -> None:
        super().__init__(vllm_config, settings, progress)
        self.loop = DraftLoop(progress, vllm_config.model_config.max_model_len)

    @property
    def attn_layer_names(self) -> list[str]:
        return self._layer_names

    def build_model(self, target: nn.Module) -> nn.Module:
        config = copy.copy(self.vllm_config)
        config.model_config, config.quant_config = self.settings.draft, None
        device = self.progress.tokens.device
        with torch.no_grad(), set_default_torch_dtype(config.model_config.dtype), device:
            self.model = initialize_model(config, prefix=_PREFIX)
        if is_hybrid(self.model):
            raise ValueError(
                f"draft model {self.settings.model} has recurrent layers, which method draft_model "
                "cannot take back; use one of attention layers, or method mtp, eagle3 or ngram"
            )
        self._layer_names = layer_names(self.model)
        return self.model.eval().requires_grad_(False)

    def load_weights(self) -> None:
        loader = get_model_loader(self.vllm_config.load_config)
        loader.fill(self.model, self.settings.draft)

    def bind(self, memory: DrafterMemory) -> None:
        self.loop.bind(memory, self.attn_layer_names)

    def propose(self, step: DraftStep) -> None:
        inputs, model = step.inputs, cast(VllmModel, self.model)
        model.forward(inputs.input_ids, inputs.positions)
        if step.sampled is None or not step.num_drafts:
            self.progress.num_drafts.zero_()
            return
        rows = self.loop.begin(inputs, step.order.num_reqs)
        token = self.progress.tokens[:, 0].index_select(0, rows.rows.clamp(min=0))
        drafts = []
        with set_forward_context(rows.context):
            for ahead in range(step.num_drafts):
                hidden = model.forward(token, self.loop.place(rows, ahead))
                token = model.compute_logits(hidden).argmax(dim=-1)
                drafts.append(token)
        self.loop.keep(rows, drafts)
