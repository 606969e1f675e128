# SPDX-License-Identifier: Apache-2.0
"""A drafter that proposes what it is told: for tests, and for measuring verification by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm.config import VllmConfig
from vllm.config.draft_methods.replay import ReplaySettings
from vllm.config.speculative import DRAFTS_KEY
from vllm.kernels.step import Progress
from vllm.v1.spec_decode.drafter import Drafter, DraftStep
from vllm.v1.worker.input_batch import RequestState

_UNKNOWN = -1


class ReplayDrafter(Drafter[ReplaySettings]):
    """Proposes the output tokens that a request brings (`extra_args["draft_token_ids"]`), each with
    probability `acceptance`, and random tokens in their stead and where it brings none.

    What is proposed for a position follows from the position and the configured seed. Everything
    happens on the device, for all rows at once.
    """

    def __init__(
        self, vllm_config: VllmConfig, settings: ReplaySettings, progress: Progress
    ) -> None:
        super().__init__(vllm_config, settings, progress)
        model = vllm_config.model_config
        assert model is not None
        vocab_size = model.get_vocab_size()
        device, rows = progress.tokens.device, len(progress.tokens)
        size = model.max_model_len + progress.width
        self._script = torch.full((rows, size), _UNKNOWN, dtype=torch.int32, device=device)
        self._ahead = torch.arange(1, progress.width, device=device)
        draws = torch.Generator().manual_seed(settings.seed)
        kept = torch.rand(size, generator=draws) < settings.acceptance
        self._kept = kept.to(device)
        self._random = torch.randint(vocab_size, (size,), generator=draws).to(device)

    def add(self, state: RequestState) -> None:
        """A request has its row."""
        drafts: Sequence[int] = (state.sampling_params.extra_args or {}).get(DRAFTS_KEY) or ()
        script = self._script[state.row]
        script.fill_(_UNKNOWN)
        first = state.num_prompt_tokens
        tokens = torch.tensor(list(drafts)[: len(script) - first], dtype=torch.int32)
        if script.is_cuda:
            tokens = tokens.pin_memory()
        script[first : first + len(tokens)].copy_(tokens, non_blocking=True)

    def propose(self, step: DraftStep) -> None:
        """Drafts after every row's newest token."""
        progress = self.progress
        if step.sampled is None:
            return
        # The newest token has the position of the first that is not computed.
        positions = progress.computed.long().unsqueeze(1) + self._ahead
        positions.clamp_(max=self._script.shape[1] - 1)
        told = self._script.gather(1, positions).long()
        follows = (told != _UNKNOWN) & self._kept[positions]
        progress.tokens[:, 1:] = torch.where(follows, told, self._random[positions])
        progress.num_drafts.fill_(min(step.num_drafts, progress.width - 1))
