# SPDX-License-Identifier: Apache-2.0
"""The drafter of method dflash: all drafts of a row in one pass.

With each step of the target its layers keep keys and values of what the target's residual streams
say about all tokens of the step, so that none is missing, whether or not there is something to
draft. To draft they run a block of one row per draft after each row's newest token. What the
block's rows leave in the slots past that token is replaced when the target has computed it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.draft_methods.dflash import DFlashSettings
from vllm.forward_context import set_forward_context
from vllm.kernels.step import Progress
from vllm.model_executor.models.dflash import DFlashDraftModel
from vllm.model_executor.models.draft_head import DraftTarget
from vllm.transformers_utils.configs.dflash import DFlashConfig
from vllm.v1.spec_decode.head_drafter import TargetReadingDrafter
from vllm.v1.worker.step_inputs import StepInputs


class DFlashDrafter(TargetReadingDrafter[DFlashSettings]):
    """The block is as long as the one that the checkpoint was trained with, also where fewer of its
    tokens are verified: its rows see each other, so a shorter one would predict other tokens."""

    head: DFlashDraftModel
    runs_without_drafts = False

    def __init__(
        self, vllm_config: VllmConfig, settings: DFlashSettings, progress: Progress
    ) -> None:
        super().__init__(vllm_config, settings, progress)
        shape, fields = (len(progress.tokens), self.tokens_at_once), self._fields
        #: the newest token of each row, then masks
        self._block = torch.full(shape, fields.mask_token_id, device=self.device)

    @property
    def _fields(self) -> DFlashConfig:
        return cast(DFlashConfig, self.checkpoint.hf_config)

    @property
    def checkpoint(self) -> ModelConfig:
        return cast(ModelConfig, self.settings.draft)

    @property
    def tokens_at_once(self) -> int:
        return self._fields.block_size

    def num_passes(self, num_drafts: int) -> int:
        """One, of the whole block."""
        return min(num_drafts, 1)

    @property
    def residual_layer_ids(self) -> tuple[int, ...]:
        return self.settings.layer_ids

    def _new_head(self, target: DraftTarget) -> DFlashDraftModel:
        config = self._own_config()
        with set_current_vllm_config(config):
            return DFlashDraftModel(vllm_config=config, target=target)

    def _read_target(self, inputs: StepInputs, fused: Tensor) -> None:
        self.head.keep_context(inputs.positions, fused)

    def _draft(self, inputs: StepInputs, num_reqs: int, num_drafts: int) -> Tensor:
        rows = self.loop.begin(inputs, num_reqs)
        block = self._block[:num_reqs]
        newest = self.progress.tokens[:, 0].index_select(0, rows.rows.clamp(min=0))
        block[:, 0] = newest
        with set_forward_context(rows.context):
            normed = self.head(block.flatten(), self.loop.place(rows, 0))
        first = self._fields.first_draft
        drafting = normed.unflatten(0, block.shape)[:, first : first + num_drafts]
        return self.loop.keep(rows, self.head.choose(drafting, newest).unbind(1))
