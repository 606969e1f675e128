# SPDX-License-Identifier: Apache-2.0
"""A drafter without a model: what followed the newest tokens when the request had them before."""

from __future__ import annotations

import torch

from vllm import decisions
from vllm.config import VllmConfig
from vllm.config.draft_methods.ngram import NgramSettings
from vllm.kernels.ngram import LookupProblem, look_up
from vllm.kernels.step import Progress
from vllm.v1.spec_decode.drafter import Drafter, DraftStep
from vllm.v1.worker.input_batch import RequestState


class NgramDrafter(Drafter[NgramSettings]):
    """Prompt lookup on the device: every row's tokens are kept there, prompt and output."""

    def __init__(
        self, vllm_config: VllmConfig, settings: NgramSettings, progress: Progress
    ) -> None:
        super().__init__(vllm_config, settings, progress)
        model = vllm_config.model_config
        assert model is not None
        device, rows = progress.tokens.device, len(progress.tokens)
        shape = (rows, model.max_model_len + progress.width)
        self._history = torch.zeros(shape, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)
        if device.type == "cuda":
            decisions.record(
                "token history",
                f"{self._history.nbytes / 2**30:.2f} GiB",
                f"ngram looks tokens up on the device: {shape[1]} of each of {rows} requests "
                "(--max-num-seqs)",
            )

    def add(self, state: RequestState) -> None:
        """A request has its row, with the tokens that the host knows."""
        tokens = torch.from_numpy(state.token_ids).to(torch.int32)
        if self._history.is_cuda:
            tokens = tokens.pin_memory()
        self._history[state.row, : len(tokens)].copy_(tokens, non_blocking=True)
        self._lengths[state.row].fill_(len(tokens))

    def propose(self, step: DraftStep) -> None:
        """Look up the newest tokens of the rows that sampled."""
        if step.sampled is None or step.counts is None:
            return
        least, most = self.settings.lengths
        look_up(
            LookupProblem(
                history=self._history,
                lengths=self._lengths,
                requests=step.inputs.sample_requests,
                sampled=step.sampled,
                counts=step.counts,
                tokens=self.progress.tokens,
                drafts=self.progress.num_drafts,
                best=self._best,
                least=least,
                most=most,
                num_drafts=step.num_drafts,
            )
        )
