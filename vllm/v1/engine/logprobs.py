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
    """Text of single tokens within a text, decoded once: at its beginning, decoders of
    SentencePiece would drop the space of a token, and two tokens have one text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        #: what tokens are decoded behind
        self._before: list[int] = []
        self._text_before: str | None = None
        if tokenizer is not None:
            self._before = tokenizer.encode("a", add_special_tokens=False)

    def get(self, token_id: int) -> str | None:
        """None where there is no tokenizer."""
        if self._tokenizer is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._within(self._tokenizer, token_id)
        return text

    def _within(self, tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
        if self._text_before is None:
            self._text_before = _decode(tokenizer, self._before)
        text = _decode(tokenizer, [*self._before, token_id])
        if text.startswith(self._text_before):
            return text.removeprefix(self._text_before)
        return _decode(tokenizer, [token_id])


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    text = tokenizer.decode(token_ids)
    assert isinstance(text, str)
    return text


class PendingPromptLogprobs:
    """A prompt's logprobs as they came: rows are made when somebody looks, in any thread, for
    those of a long prompt take longer than the output handler has."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._wires: list[WireLogprobs] = []
        self._rows: PromptLogprobs | None = None

    @property
    def num_entries(self) -> int:
        """Tokens in all rows."""
        return sum(wire.rows * wire.width for wire in self._wires)

    def add(self, wire: WireLogprobs) -> None:
        """Rows of the next prompt positions."""
        self._wires.append(wire)
        self._rows = None

    def rows(self) -> PromptLogprobs:
        """All positions so far, made once."""
        rows = self._rows
        if rows is None:
            rows = [None]
            for wire in self._wires:
                rows += _rows(wire, self._texts)
            self._rows = rows
        return rows


class LogprobsCollector:
    """Gathers a request's logprobs; `sample`/`prompt` are None unless they were asked for."""

    def __init__(self, params: SamplingParams, texts: TokenTexts) -> None:
        self._texts = texts if params.detokenize else TokenTexts(None)
        self.sample: SampleLogprobs | None = None if params.logprobs is None else []
        self.prompt: PendingPromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self.prompt = PendingPromptLogprobs(self._texts)
        self.cumulative: float | None = None if params.logprobs is None else 0.0

    def add_sample(self, wire: WireLogprobs, num_tokens: int) -> None:
        """Rows of the newest tokens, of which the first `num_tokens` count."""
        assert self.sample is not None and self.cumulative is not None
        rows = _rows(wire, self._texts)[:num_tokens]
        self.sample += rows
        for row in rows:
            self.cumulative += next(iter(row.values())).logprob

    def add_prompt(self, wire: WireLogprobs) -> None:
        """Rows of the next prompt positions."""
        assert self.prompt is not None
        self.prompt.add(wire)

    def take_sample(self) -> SampleLogprobs | None:
        """Rows of the tokens since the last call; they are kept no longer."""
        rows = self.sample
        if rows is not None:
            self.sample = []
        return rows

    def take_prompt(self) -> PendingPromptLogprobs | None:
        """The prompt's logprobs, for somebody who frees them where they are used."""
        prompt, self.prompt = self.prompt, None
        return prompt


def _rows(wire: WireLogprobs, texts: TokenTexts) -> list[dict[int, Logprob]]:
    lists = logprobs_from_wire(wire)
    return [
        _row(ids, values, rank, texts)
        for ids, values, rank in zip(
            lists.token_ids.tolist(), lists.logprobs.tolist(), lists.ranks.tolist(), strict=True
        )
    ]


def _row(ids: list[int], values: list[float], rank: int, texts: TokenTexts) -> dict[int, Logprob]:
    """Column 0 is the actual token with its `rank`; column i the i-th most likely."""
    row = {ids[0]: Logprob(values[0], rank, texts.get(ids[0]))}
    for i in range(1, len(ids)):
        if ids[i] not in row:
            row[ids[i]] = Logprob(values[i], i, texts.get(ids[i]))
    return row
