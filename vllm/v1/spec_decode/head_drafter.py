# SPDX-License-Identifier: Apache-2.0
"""Drafters that are heads on the target (mtp, eagle3): layers that read its hidden states.

After each step the head runs over all tokens that the target ran, each with the token after it, so
that its keys and values are what the target's hidden states say, also where an earlier round had
only its own; then token by token on its own hidden states. Prompts take the same way in chunks.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, cast

import torch
from torch import Tensor, nn

from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.draft_methods.eagle3 import Eagle3Settings
from vllm.config.draft_methods.mtp import MtpSettings
from vllm.forward_context import set_forward_context
from vllm.model_executor.layer_errors import name_failing_module
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base import set_default_torch_dtype
from vllm.model_executor.models.draft_head import DraftHead, DraftTarget, TargetReader
from vllm.v1.spec_decode.drafter import DrafterMemory, DraftStep, S
from vllm.v1.spec_decode.layer_drafter import LayerDrafter
from vllm.v1.worker.staging import StagedArray
from vllm.v1.worker.step_inputs import StepInputs


class TargetReadingDrafter(LayerDrafter[S], Generic[S]):
    """Its network reads the target's hidden states; subclasses build the network."""

    head: TargetReader

    @abstractmethod
    def _new_head(self, target: DraftTarget) -> TargetReader:
        """The network with uninitialised weights."""

    @abstractmethod
    def _read_target(self, inputs: StepInputs, fused: Tensor) -> None:
        """`observe`, with what the network keeps of the target: `[tokens, hidden_size]`."""

    @property
    @abstractmethod
    def checkpoint(self) -> ModelConfig:
        """Where the network's tensors are."""

    # ---- start-up ------------------------------------------------------------------------------

    def _new_model(self, target: nn.Module) -> nn.Module:
        dtype = self.vllm_config.model_config.dtype
        with torch.no_grad(), set_default_torch_dtype(dtype), self.device:
            self.head = self._new_head(cast(DraftTarget, target))
        return self.head

    def load_weights(self) -> None:
        loader = get_model_loader(self.vllm_config.load_config)
        loader.fill(self.head, self.checkpoint)

    def _own_config(self) -> VllmConfig:
        """What a head with a checkpoint of its own is built from."""
        config = copy.copy(self.vllm_config)
        config.model_config, config.quant_config = self.checkpoint, None
        return config

    # ---- the step, whose errors name the module that they come from ----------------------------

    def observe(self, inputs: StepInputs, hidden: Tensor, residual: Sequence[Tensor]) -> None:
        try:
            self._read_target(inputs, self.head.fuse(hidden, list(residual)))
        except Exception as error:
            name_failing_module(error, self.head, self.head.prefix)
            raise

    def _run(self, inputs: StepInputs, num_reqs: int, num_drafts: int) -> Tensor:
        try:
            return super()._run(inputs, num_reqs, num_drafts)
        except Exception as error:
            name_failing_module(error, self.head, self.head.prefix)
            raise


class HeadDrafter(TargetReadingDrafter[S], Generic[S]):
    """Drafts token by token; subclasses build the head."""

    head: DraftHead
    #: what the head fuses of the step's tokens `[tokens, hidden]`, at a fixed address
    _hidden: Tensor | None = None

    @abstractmethod
    def _new_head(self, target: DraftTarget) -> DraftHead:
        """The head with uninitialised weights."""

    def bind(self, memory: DrafterMemory) -> None:
        super().bind(memory)
        if self._hidden is None:
            self._allocate(memory.inputs.max_tokens)

    def _allocate(self, tokens: int) -> None:
        """What lies at fixed addresses: of a step's tokens."""
        dtype = self.vllm_config.model_config.dtype
        self._hidden = torch.zeros(tokens, self.head.hidden_size, dtype=dtype, device=self.device)
        depth = 3 if self.vllm_config.scheduler_config.async_scheduling else 2
        self._next_ids = StagedArray((tokens,), torch.int64, self.device, depth)

    def unused(self, num_tokens: int) -> Sequence[Tensor]:
        assert self._hidden is not None
        return *super().unused(num_tokens), self._hidden[num_tokens:]

    # ---- the step ------------------------------------------------------------------------------

    def _read_target(self, inputs: StepInputs, fused: Tensor) -> None:
        assert self._hidden is not None
        self._hidden[: len(fused)].copy_(fused)

    def _take(self, step: DraftStep) -> None:
        """The token after each of the step's: what the host knows, and what was sampled. Of drafts
        that were rejected, and of padding, it is any token."""
        order, inputs, sampled = step.order, step.inputs, step.sampled
        ids = self._next_ids.device
        if order.decode_only:
            # Samples of decodes lie as their tokens do. At its end a request has none: -1.
            assert sampled is not None
            torch.clamp(sampled, min=0, out=ids[: len(sampled)])
            return
        host = self._next_ids.next()
        known = order.num_known - order.num_computed - 1
        starts = inputs.query_start_loc_cpu
        for i in (known > 0).nonzero()[0].tolist():
            first, count = int(order.num_computed[i]) + 1, int(order.num_scheduled[i])
            tokens = order.states[i].token_ids[first : first + count]
            host[starts[i] : starts[i] + len(tokens)] = tokens
        self._next_ids.upload(inputs.num_tokens)
        if sampled is not None:
            ids.index_copy_(0, inputs.sample_indices, sampled.clamp(min=0))

    def _rows(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """What the head takes of the step's tokens, padding included."""
        assert self._hidden is not None
        count = inputs.num_padded
        return self._next_ids.device[:count], inputs.positions, self._hidden[:count]

    def _keep(self, inputs: StepInputs) -> None:
        self.head.keep(*self._rows(inputs))

    def _draft(self, inputs: StepInputs, num_reqs: int, num_drafts: int) -> Tensor:
        normed, hidden = self.head(*self._rows(inputs))
        rows = self.loop.begin(inputs, num_reqs)
        normed, hidden = normed.index_select(0, rows.last), hidden.index_select(0, rows.last)
        drafts = [self.head.best_tokens(normed)]
        with set_forward_context(rows.context):
            for ahead in range(num_drafts - 1):
                positions = self.loop.place(rows, ahead)
                normed, hidden = self.head(drafts[-1], positions, hidden)
                drafts.append(self.head.best_tokens(normed))
        return self.loop.keep(rows, drafts)


class MtpDrafter(HeadDrafter[MtpSettings]):
    """The target's own head."""

    def _new_head(self, target: DraftTarget) -> DraftHead:
        from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MTP

        with set_current_vllm_config(self.vllm_config):
            return Qwen3_5MTP(vllm_config=self.vllm_config, target=target)

    @property
    def checkpoint(self) -> ModelConfig:
        target, settings = self.vllm_config.model_config, self.settings
        if settings.checkpoint is None:
            return target
        own = copy.copy(target)
        own.model, own.revision = settings.checkpoint, settings.checkpoint_revision
        return own


class Eagle3Drafter(HeadDrafter[Eagle3Settings]):
    """A head with a checkpoint of its own."""

    @property
    def residual_layer_ids(self) -> tuple[int, ...]:
        return self.settings.layer_ids

    def _new_head(self, target: DraftTarget) -> DraftHead:
        from vllm.model_executor.models.eagle3 import Eagle3DraftModel

        config = self._own_config()
        with set_current_vllm_config(config):
            return Eagle3DraftModel(vllm_config=config, target=target)

    @property
    def checkpoint(self) -> ModelConfig:
        return cast(ModelConfig, self.settings.draft)
