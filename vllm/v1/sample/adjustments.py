# SPDX-License-Identifier: Apache-2.0
"""Per-request changes to logits: masks, biases, penalties, banned words, minimum length.

Only requests that ask for one of these have an `Adjustments`; its state lives on the device and is
advanced with the sampled token there, so nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vllm.kernels.sampling.adjustment_fields import Field
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import to_device

_NEVER = float("-inf")


class Adjustments:
    """Logit changes of one request.

    `token_ids`: prompt and output so far; `num_prompt_tokens` of them are the prompt. `bias
    [vocab]` fp32 and `marks [vocab]` int32 (twice the token's count in the output, plus one for a
    token of the prompt) are None where nothing needs them. Ids outside the vocabulary can neither
    be sampled nor barred and are left out.
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
        self.vocab_size = vocab_size
        self.device = device
        self.num_prompt_tokens = num_prompt_tokens
        output = token_ids[num_prompt_tokens:]
        self.bias = _bias(params, vocab_size, device)
        stop_ids = _known(sorted(params.all_stop_token_ids), vocab_size)
        self.stop_ids = to_device(torch.from_numpy(stop_ids), device)
        words = params.bad_words_token_ids or ()
        self.words = BannedWords(words, output, vocab_size, device) if words else None
        self.marks: Tensor | None = None
        if params.penalises:
            marks = torch.bincount(torch.from_numpy(output), minlength=vocab_size).int() * 2
            marks[torch.from_numpy(token_ids[:num_prompt_tokens])] |= 1
            self.marks = to_device(marks, device)
        self._acts_always = any(kept is not None for kept in (self.bias, self.marks, self.words))
        # A grammar's masks bar stop tokens themselves, where anything else may follow.
        barred = params.structured_outputs is None and len(stop_ids) > 0
        self._stop_barred_until = params.min_tokens if barred else 0

    @classmethod
    def needed(cls, params: SamplingParams) -> bool:
        """Whether a request with `params` has anything to adjust."""
        return params.adjusts_logits

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
            Field.NUM_PROMPT: self.num_prompt_tokens,
            Field.MIN_TOKENS: self._stop_barred_until,
        }
        if self.words is not None:
            fields |= {
                Field.WORDS: self.words.ids.data_ptr(),
                Field.STARTS: self.words.starts.data_ptr(),
                Field.NUM_WORDS: len(self.words),
                Field.RECENT: self.words.recent.data_ptr(),
                Field.NUM_RECENT: len(self.words.recent),
            }
        return np.array([fields.get(field, 0) for field in Field], dtype=np.int64)

    def bars_stop(self, num_output_tokens: int) -> bool:
        """Whether the minimum length bars stop tokens after `num_output_tokens`."""
        return num_output_tokens < self._stop_barred_until

    def acts(self, num_output_tokens: int) -> bool:
        """Whether anything changes or is counted at the token after `num_output_tokens`."""
        return self._acts_always or num_output_tokens < self._stop_barred_until

    def apply(
        self, logits: Tensor, position: int, drafts: Tensor | None = None, first: int = 0
    ) -> None:
        """Change `logits [tokens]` in place, of the vocabulary's tokens from `first` on, for the
        token to sample at `position`, which the `drafts [n]` int64 stand right before (host
        only)."""
        tokens = slice(first, first + len(logits))
        if drafts is None:
            drafts = torch.empty(0, dtype=torch.int64, device=self.device)
        if self.bias is not None:
            logits += self.bias[tokens]
        if self.marks is not None:
            self._penalise(logits, self._marks_after(self.marks, drafts)[tokens])
        if self.bars_stop(position - self.num_prompt_tokens):
            _bar(logits, self.stop_ids, first)
        if self.words is not None:
            _bar(logits, self.words.completing(drafts), first)

    def observe(self, tokens: Tensor) -> None:
        """Take note of the output `tokens [n]` int64, -1 where there was none (host only)."""
        if self.marks is not None:
            self.marks = self._marks_after(self.marks, tokens)
        if self.words is not None:
            self.words.observe(tokens)

    def _marks_after(self, marks: Tensor, tokens: Tensor) -> Tensor:
        """`marks` with the `tokens` counted as output; those outside the vocabulary are not."""
        if not len(tokens):
            return marks
        known = tokens[(tokens >= 0) & (tokens < self.vocab_size)]
        return marks.index_add(0, known, torch.full_like(known, 2, dtype=marks.dtype))

    def _penalise(self, logits: Tensor, marks: Tensor) -> None:
        params = self.params
        counts = marks >> 1
        if params.repetition_penalty != 1.0:
            factor = torch.where(marks > 0, params.repetition_penalty, 1.0)
            logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
        logits -= params.frequency_penalty * counts
        logits -= params.presence_penalty * (counts > 0)


def _bar(logits: Tensor, token_ids: Tensor, first: int) -> None:
    """Of `logits [tokens]`, from the vocabulary's `first` on, those of `token_ids`."""
    places = token_ids - first
    logits.index_fill_(0, places[(places >= 0) & (places < len(logits))], _NEVER)


def _bias(params: SamplingParams, vocab_size: int, device: torch.device) -> Tensor | None:
    if not params.logit_bias and not params.allowed_token_ids:
        return None
    bias = np.zeros(vocab_size, dtype=np.float32)
    if params.allowed_token_ids:
        bias.fill(_NEVER)
        bias[_known(params.allowed_token_ids, vocab_size)] = 0.0
    if params.logit_bias:
        known = {token: v for token, v in params.logit_bias.items() if 0 <= token < vocab_size}
        bias[np.array(list(known), dtype=np.int64)] += np.array(list(known.values()), np.float32)
    return to_device(torch.from_numpy(bias), device)


def _known(token_ids: list[int], vocab_size: int) -> np.ndarray:
    """Those of `token_ids` in the vocabulary, int64."""
    return np.array([token for token in token_ids if 0 <= token < vocab_size], dtype=np.int64)


class BannedWords:
    """Words of any lengths one after the other, and the newest output tokens beside them.

    `ids [total]` int64: the words' tokens; word w has those of `starts[w]` to `starts[w + 1]`
    (`starts [len + 1]` int64). `recent [longest - 1]` int64: the last output tokens, -1 before the
    first; all three on `device`. Words with a token outside `[0, vocab_size)` cannot come up and
    are left out.
    """

    def __init__(
        self,
        words: Sequence[Sequence[int]],
        output: np.ndarray,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        words = [word for word in words if word and 0 <= min(word) and max(word) < vocab_size]
        lengths = np.array([len(word) for word in words], dtype=np.int64)
        self._host_ids = np.array([token for word in words for token in word], dtype=np.int64)
        self._host_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        longest = int(lengths.max(initial=1))
        recent = np.full(longest - 1, -1, dtype=np.int64)
        known = output[len(output) - min(len(recent), len(output)) :]
        recent[len(recent) - len(known) :] = known
        self.ids = to_device(torch.from_numpy(self._host_ids), device)
        self.starts = to_device(torch.from_numpy(self._host_starts), device)
        self.recent = to_device(torch.from_numpy(recent), device)

    def __len__(self) -> int:
        return len(self._host_starts) - 1

    def completing(self, drafts: Tensor) -> Tensor:
        """`[n]` int64: tokens that would complete a word after the `drafts [m]` (host only)."""
        ids, words, places, last = self._prefixes
        begun = torch.ones(len(self), dtype=torch.bool)
        begun[words[ids != self._recent_after(drafts)[places]]] = False
        return last[begun]

    def observe(self, tokens: Tensor) -> None:
        """Take note of the output `tokens [n]` int64 (host only)."""
        self.recent = self._recent_after(tokens)

    def _recent_after(self, tokens: Tensor) -> Tensor:
        return torch.cat([self.recent, tokens])[len(tokens) :] if len(tokens) else self.recent

    @cached_property
    def _prefixes(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(ids, words, places, last)`: of every token but the words' last ones its id, its word
        and its place in `recent`; and the last ones, one per word."""
        ends = self._host_starts[1:] - 1
        word = np.repeat(np.arange(len(self)), np.diff(self._host_starts))
        before = ends[word] - np.arange(len(word))
        prefix = before > 0
        arrays = (
            self._host_ids[prefix],
            word[prefix],
            len(self.recent) - before[prefix],
            self._host_ids[ends],
        )
        ids, words, places, last = (torch.from_numpy(array) for array in arrays)
        return ids, words, places, last
