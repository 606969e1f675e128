# SPDX-License-Identifier: Apache-2.0
"""Beam search over one prompt: which beams to score next, and which have ended.

The engine is not involved: `advance` takes the most likely next tokens of every running beam. The
search is that of transformers' `generate(num_beams=..., early_stopping="never")`: it ends when no
running beam can outrank the worst ended one (Wu et al. 2016, arXiv:1609.08144, section 7, with the
length penalty `length ** length_penalty`), so ending early never changes the result.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logprobs import Logprob

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import BeamSearchParams


@dataclass
class BeamSearchSequence:
    """One beam. `tokens` and `text` start with the prompt.

    `logprobs`: per generated token what its beam could choose from. `cum_logprob`: natural log of
    the generated tokens' probability, the end-of-sequence token included. `finish_reason`: "stop"
    or "length"; `stop_reason`: the token that ended it, None for the tokenizer's own end.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of a prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class _Candidate:
    """A running beam and its next token."""

    cum_logprob: float
    beam: BeamSearchSequence
    choices: dict[int, Logprob] = field(repr=False)
    token: int


@dataclass(frozen=True)
class _Ended:
    """`score`: the cumulative logprob after the length penalty."""

    score: float
    sequence: BeamSearchSequence


class BeamSearch:
    """The beams of one prompt.

    `end_tokens` end a beam; the first one is the tokenizer's own. `max_steps` >= 1: most tokens to
    generate.
    """

    def __init__(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        end_tokens: Sequence[int],
        max_steps: int,
    ) -> None:
        self._width = params.beam_width
        self._penalty = params.length_penalty
        self._keep_end = params.include_stop_str_in_output
        self._end_tokens = () if params.ignore_eos else tuple(end_tokens)
        self._max_steps = max_steps
        self._steps = 0
        self._ended: list[_Ended] = []
        self.running = [BeamSearchSequence(list(prompt), [])]

    @property
    def num_choices(self) -> int:
        """Next tokens needed per beam: `beam_width` must be left when every end was likelier."""
        return self._width * (1 + len(self._end_tokens))

    @property
    def done(self) -> bool:
        return not self.running

    def advance(self, choices: Sequence[dict[int, Logprob]]) -> None:
        """Continue by one token; `choices[i]`: the likeliest next tokens of `running[i]`."""
        self._steps += 1
        candidates = [
            _Candidate(beam.cum_logprob + choice.logprob, beam, options, token)
            for beam, options in zip(self.running, choices, strict=True)
            for token, choice in options.items()
        ]
        best = heapq.nlargest(self.num_choices, candidates, key=lambda c: c.cum_logprob)
        self.running = []
        for rank, candidate in enumerate(best):
            if candidate.token in self._end_tokens:
                if rank < self._width:
                    self._end(candidate)
            elif len(self.running) < self._width:
                self.running.append(self._extended(candidate))
        if self._steps == self._max_steps:
            for beam in self.running:
                beam.finish_reason = "length"
                self._ended.append(_Ended(self._score(beam.cum_logprob, self._steps), beam))
        self._ended = heapq.nlargest(self._width, self._ended, key=lambda e: e.score)
        if self._steps == self._max_steps or not self._can_improve():
            self.running = []

    def output(self) -> BeamSearchOutput:
        """The result of a search that is done."""
        return BeamSearchOutput([ended.sequence for ended in self._ended])

    def _extended(self, candidate: _Candidate) -> BeamSearchSequence:
        return BeamSearchSequence(
            [*candidate.beam.tokens, candidate.token],
            [*candidate.beam.logprobs, candidate.choices],
            cum_logprob=candidate.cum_logprob,
        )

    def _end(self, candidate: _Candidate) -> None:
        sequence = self._extended(candidate)
        if not self._keep_end:
            sequence.tokens.pop()
            sequence.logprobs.pop()
        sequence.finish_reason = "stop"
        if candidate.token != self._end_tokens[0]:
            sequence.stop_reason = candidate.token
        self._ended.append(_Ended(self._score(candidate.cum_logprob, self._steps), sequence))

    def _score(self, cum_logprob: float, length: int) -> float:
        """`length`: generated tokens, the end-of-sequence token included."""
        return cum_logprob / length**self._penalty

    def _can_improve(self) -> bool:
        """Whether the best running beam may still outrank an ended one.

        Logprobs only fall, so its best score is the present sum over the most favourable length.
        """
        if len(self._ended) < self._width or not self.running:
            return bool(self.running)
        length = self._max_steps if self._penalty > 0 else self._steps
        return self._score(self.running[0].cum_logprob, length) > self._ended[-1].score
