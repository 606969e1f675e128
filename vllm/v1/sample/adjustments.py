# SPDX-License-Identifier: Apache-2.0
"""Per-request changes to logits: masks, biases, penalties, banned words, minimum length.

Only requests that ask for one of these have an `Adjustments`; its state lives on the device and is
advanced with the sampled token there, so nothing waits for the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams

_NEVER = float("-inf")


class Adjustments:
    """Logit changes of one request.

    `token_ids`: prompt and output so far; `num_prompt_tokens` of them are the prompt.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.params = params
        self.device = device
        output = token_ids[num_prompt_tokens:]
        self.bias = _bias(params, vocab_size, device)
        self.stop_ids = _index(sorted(params.all_stop_token_ids), device)
        self.bad_words = [_index(list(word), device) for word in (params.bad_words_token_ids or [])]
        longest = max((len(w) for w in self.bad_words), default=1)
        self.recent = torch.full((max(longest - 1, 1),), -1, dtype=torch.int64, device=device)
        self.counts: Tensor | None = None
        if _penalises(params):
            self.counts = torch.bincount(torch.from_numpy(output), minlength=vocab_size).to(
                device, torch.float32
            )
            seen = torch.zeros(vocab_size, dtype=torch.bool)
            seen[torch.from_numpy(token_ids[:num_prompt_tokens])] = True
            self.in_prompt = seen.to(device)
        for token in output[-len(self.recent) :]:
            self._remember(torch.tensor([int(token)], device=device))

    @classmethod
    def needed(cls, params: SamplingParams) -> bool:
        """Whether a request with `params` has anything to adjust."""
        return bool(
            params.logit_bias
            or params.allowed_token_ids
            or params.bad_words_token_ids
            or params.min_tokens
            or _penalises(params)
        )

    def apply(self, logits: Tensor, num_output_tokens: int) -> None:
        """Change `logits [vocab]` in place; `num_output_tokens` were sampled before this one."""
        if self.bias is not None:
            logits += self.bias
        # A grammar's masks bar stop tokens themselves, where anything else may follow.
        if num_output_tokens < self.params.min_tokens and self.params.structured_outputs is None:
            logits.index_fill_(0, self.stop_ids, _NEVER)
        for word in self.bad_words:
            self._ban(logits, word)
        if self.counts is not None:
            self._penalise(logits, self.counts)

    def observe(self, token: Tensor) -> None:
        """Take note of the sampled `token [1]` (device int64)."""
        if self.counts is not None:
            self.counts.index_add_(0, token, torch.ones(1, device=self.device))
        if self.bad_words:
            self._remember(token)

    def _remember(self, token: Tensor) -> None:
        self.recent = torch.cat([self.recent[1:], token])

    def _ban(self, logits: Tensor, word: Tensor) -> None:
        prefix = len(word) - 1
        if prefix == 0:
            logits.index_fill_(0, word, _NEVER)
            return
        matched = (self.recent[-prefix:] == word[:-1]).all()
        last = word[-1:]
        logits.index_copy_(0, last, torch.where(matched, _NEVER, logits.index_select(0, last)))

    def _penalise(self, logits: Tensor, counts: Tensor) -> None:
        params = self.params
        appeared = counts > 0
        if params.repetition_penalty != 1.0:
            factor = torch.where(appeared | self.in_prompt, params.repetition_penalty, 1.0)
            logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
        logits -= params.frequency_penalty * counts
        logits -= params.presence_penalty * appeared


def _penalises(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


def _bias(params: SamplingParams, vocab_size: int, device: torch.device) -> Tensor | None:
    if not params.logit_bias and not params.allowed_token_ids:
        return None
    bias = torch.zeros(vocab_size)
    if params.allowed_token_ids:
        bias.fill_(_NEVER)
        bias[params.allowed_token_ids] = 0.0
    for token, value in (params.logit_bias or {}).items():
        bias[int(token)] += value
    return bias.to(device)


def _index(ids: list[int], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)
