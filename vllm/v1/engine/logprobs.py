# SPDX-License-Identifier: Apache-2.0
"""Logprobs of a request: arrays from the core to dicts with text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logprobs import Logprob, PromptLogprobs, SampleLogprobs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import WireLogprobs
from vllm.v1.serial_utils import logprobs_from_wire

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """Text of single tokens, decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def get(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            decoded = self._tokenizer.decode([token_id])
            assert isinstance(decoded, str)
            text = self._texts[token_id] = decoded
        return text


class LogprobsCollector:
    """Gathers a request's logprobs; `sample`/`prompt` are None unless they were asked for."""

    def __init__(self, params: SamplingParams, texts: TokenTexts) -> None:
        self._texts = texts if params.detokenize else TokenTexts(None)
        self.sample: SampleLogprobs | None = None if params.logprobs is None else []
        self.prompt: PromptLogprobs | None = None if params.prompt_logprobs is None else [None]
        self.cumulative: float | None = None if params.logprobs is None else 0.0

    def add_sample(self, wire: WireLogprobs, num_tokens: int) -> None:
        """Rows of the newest tokens, of which the first `num_tokens` count."""
        assert self.sample is not None and self.cumulative is not None
        rows = self._rows(wire)[:num_tokens]
        self.sample += rows
        for row in rows:
            self.cumulative += next(iter(row.values())).logprob

    def add_prompt(self, wire: WireLogprobs) -> None:
        """Rows of the next prompt positions."""
        assert self.prompt is not None
        self.prompt += self._rows(wire)

    def cut(self, num_tokens: int) -> None:
        """Keep the logprobs of the first `num_tokens` tokens."""
        if self.sample is not None and len(self.sample) > num_tokens:
            del self.sample[num_tokens:]
            self.cumulative = sum(next(iter(row.values())).logprob for row in self.sample)

    def _rows(self, wire: WireLogprobs) -> list[dict[int, Logprob]]:
        lists = logprobs_from_wire(wire)
        return [
            self._row(ids, values, rank)
            for ids, values, rank in zip(
                lists.token_ids.tolist(),
                lists.logprobs.tolist(),
                lists.ranks.tolist(),
                strict=True,
            )
        ]

    def _row(self, ids: list[int], values: list[float], rank: int) -> dict[int, Logprob]:
        """Column 0 is the actual token with its `rank`; column i the i-th most likely."""
        text = self._texts.get
        row = {ids[0]: Logprob(values[0], rank, text(ids[0]))}
        for i in range(1, len(ids)):
            if ids[i] not in row:
                row[ids[i]] = Logprob(values[i], i, text(ids[i]))
        return row
