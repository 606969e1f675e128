# SPDX-License-Identifier: Apache-2.0
"""Per-request changes to logits: masks, biases, penalties, banned words, minimum length.

Only requests that ask for one of these have an `Adjustments`; its state lives on the device and is
advanced with the sampled token there, so nothing waits for the host.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vllm.kernels.adjustment_fields import Field
from vllm.sampling_params import SamplingParams

_NEVER = float("-inf")


class Adjustments:
    """Logit changes of one request.

    `token_ids`: prompt and output so far; `num_prompt_tokens` of them are the prompt. `bias
    [vocab]` fp32 and `marks [vocab]` int32 (twice the token's count in the output, plus one for a
    token of the prompt) are None where nothing needs them. `words [num_words, longest]` int64 are
    the banned words, right-aligned, -1 before shorter ones; `recent [longest - 1]` int64 the last
    output tokens, -1 before the first.
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
        stop_ids = torch.tensor(sorted(params.all_stop_token_ids), dtype=torch.int64)
        self.stop_ids = stop_ids.to(device)
        self.words = _words(params.bad_words_token_ids or []).to(device)
        recent = torch.full((max(self.words.shape[1] - 1, 0),), -1, dtype=torch.int64)
        known = torch.from_numpy(output[len(output) - min(len(recent), len(output)) :])
        recent[len(recent) - len(known) :] = known
        self.recent = recent.to(device)
        self.marks: Tensor | None = None
        if _penalises(params):
            marks = torch.bincount(torch.from_numpy(output), minlength=vocab_size).int() * 2
            marks[torch.from_numpy(token_ids[:num_prompt_tokens])] |= 1
            self.marks = marks.to(device)
        self._acts_always = self.bias is not None or self.marks is not None or len(self.words) > 0
        # A grammar's masks bar stop tokens themselves, where anything else may follow.
        barred = params.structured_outputs is None and len(stop_ids) > 0
        self._stop_barred_until = params.min_tokens if barred else 0

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

    @cached_property
    def descriptor(self) -> np.ndarray:
        """This request for the kernels: int64 `[len(Field)]`, its tensors by address."""
        params = self.params
        numbers = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        repetition, frequency, presence = np.array(numbers, np.float32).view(np.int32).tolist()
        fields = {
            Field.MARKS: 0 if self.marks is None else self.marks.data_ptr(),
            Field.BIAS: 0 if self.bias is None else self.bias.data_ptr(),
            Field.REPETITION: repetition,
            Field.FREQUENCY: frequency,
            Field.PRESENCE: presence,
            Field.BANNED: self.stop_ids.data_ptr(),
            Field.NUM_BANNED: len(self.stop_ids),
            Field.WORDS: self.words.data_ptr(),
            Field.NUM_WORDS: len(self.words),
            Field.LONGEST: self.words.shape[1],
            Field.RECENT: self.recent.data_ptr(),
        }
        return np.array([fields.get(field, 0) for field in Field], dtype=np.int64)

    def bars_stop(self, num_output_tokens: int) -> bool:
        """Whether the minimum length bars stop tokens after `num_output_tokens`."""
        return num_output_tokens < self._stop_barred_until

    def acts(self, num_output_tokens: int) -> bool:
        """Whether anything changes or is counted at the token after `num_output_tokens`."""
        return self._acts_always or num_output_tokens < self._stop_barred_until

    def apply(self, logits: Tensor, num_output_tokens: int) -> None:
        """Change `logits [vocab]` in place; `num_output_tokens` were sampled before this one."""
        if self.bias is not None:
            logits += self.bias
        if self.marks is not None:
            self._penalise(logits, self.marks)
        if self.bars_stop(num_output_tokens):
            logits.index_fill_(0, self.stop_ids, _NEVER)
        prefixes, last = self.words[:, :-1], self.words[:, -1]
        matched = ((prefixes == -1) | (prefixes == self.recent)).all(1)
        logits.index_fill_(0, last[matched], _NEVER)

    def observe(self, token: Tensor) -> None:
        """Take note of the sampled `token [1]` (device int64)."""
        if self.marks is not None:
            self.marks[token] += 2
        if len(self.recent):
            self.recent = torch.cat([self.recent[1:], token])

    def _penalise(self, logits: Tensor, marks: Tensor) -> None:
        params = self.params
        counts = marks >> 1
        if params.repetition_penalty != 1.0:
            factor = torch.where(marks > 0, params.repetition_penalty, 1.0)
            logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
        logits -= params.frequency_penalty * counts
        logits -= params.presence_penalty * (counts > 0)


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


def _words(words: list[list[int]]) -> Tensor:
    longest = max((len(word) for word in words), default=1)
    padded = [[-1] * (longest - len(word)) + list(word) for word in words]
    return torch.tensor(padded, dtype=torch.int64).reshape(len(words), longest)
