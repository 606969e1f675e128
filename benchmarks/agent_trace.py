# SPDX-License-Identifier: Apache-2.0
"""A synthetic trace of agents at work: the prompts and outputs a server sees, as token ids.

    python benchmarks/agent_trace.py [--seed 0] [--conversations 200] ...

Prints what the trace consists of. Conversations share system prompts with tool preambles, grow turn
by turn, branch off earlier turns and regenerate answers; raw completions share few-shot templates;
the rest are prompts seen once. Everything is random but for the seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
VOCAB_SIZE = 248_320
#: what a chat template puts around a message, and before the answer
_MESSAGE_START, _MESSAGE_END, _ANSWER_START = 4, 2, 3


@dataclass(frozen=True)
class TraceConfig:
    """Lengths in tokens; `..._median` of log-normal distributions with `spread` as sigma."""

    seed: int = 0
    conversations: int = 200
    active: int = 24
    system_prompts: int = 8
    preamble_median: int = 3000
    mean_turns: float = 6.0
    message_median: int = 120
    tool_result_part: float = 0.4
    tool_result_median: int = 1200
    answer_median: int = 150
    spread: float = 0.8
    branch_part: float = 0.1
    regenerate_part: float = 0.08
    completion_part: float = 0.15
    templates: int = 6
    one_off_part: float = 0.1
    max_tokens: int = 32_000


@dataclass(frozen=True)
class TraceRequest:
    """`tokens [n]`: the prompt, its first `num_prompt`, and the answer. `marks`: ends of the system
    and tool preamble, which a chat server knows."""

    kind: str
    tokens: Tokens
    num_prompt: int
    marks: tuple[int, ...] = ()

    @property
    def num_computed(self) -> int:
        """Tokens whose state exists in the end: the last one of the answer is never fed back."""
        return len(self.tokens) - 1


@dataclass(eq=False)
class _Conversation:
    context: Tokens
    turns_left: int
    marks: tuple[int, ...]
    #: contexts after earlier turns, to branch off
    past: list[Tokens]


class TraceGenerator:
    """Makes the requests one after the other, in the order in which they arrive."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self._rng = np.random.default_rng(config.seed)
        self._systems = [self._text(config.preamble_median) for _ in range(config.system_prompts)]
        self._templates = [self._text(config.preamble_median // 2) for _ in range(config.templates)]
        # A few prompts are used most.
        weights = 1.0 / np.arange(1, config.system_prompts + 1)
        self._popularity = weights / weights.sum()

    def requests(self) -> list[TraceRequest]:
        """The whole trace."""
        config, rng = self.config, self._rng
        waiting = config.conversations
        active: list[_Conversation] = []
        made: list[TraceRequest] = []
        while waiting or active:
            while waiting and len(active) < config.active:
                active.append(self._start())
                waiting -= 1
            draw = rng.random()
            if draw < config.completion_part:
                made.append(self._completion())
            elif draw < config.completion_part + config.one_off_part:
                made.append(self._one_off())
            else:
                chosen = active[int(rng.integers(len(active)))]
                made += self._turn(chosen)
                if chosen.turns_left <= 0:
                    active.remove(chosen)
        return made

    # ---- parts ---------------------------------------------------------------------------------

    def _length(self, median: int) -> int:
        drawn = self._rng.lognormal(np.log(median), self.config.spread)
        return int(np.clip(drawn, 8, self.config.max_tokens // 4))

    def _text(self, median: int) -> Tokens:
        return self._rng.integers(0, VOCAB_SIZE, self._length(median), dtype=np.int32)

    def _markup(self, length: int) -> Tokens:
        """The same tokens each time."""
        return np.arange(length, dtype=np.int32)

    def _start(self) -> _Conversation:
        system = self._systems[int(self._rng.choice(len(self._systems), p=self._popularity))]
        context = np.concatenate([system, self._markup(_MESSAGE_END)])
        turns = int(self._rng.geometric(1.0 / self.config.mean_turns))
        return _Conversation(context, turns, (len(context),), [context])

    def _turn(self, chat: _Conversation) -> list[TraceRequest]:
        """The next request of a conversation, and its regeneration if there is one."""
        config, rng = self.config, self._rng
        kind = "turn" if len(chat.past) > 1 else "first turn"
        if len(chat.past) > 2 and rng.random() < config.branch_part:
            kind = "branch"
            chat.context = chat.past[int(rng.integers(1, len(chat.past) - 1))]
        is_result = rng.random() < config.tool_result_part
        median = config.tool_result_median if is_result else config.message_median
        prompt = np.concatenate(
            [
                chat.context,
                self._markup(_MESSAGE_START),
                self._text(median),
                self._markup(_MESSAGE_END),
                self._markup(_ANSWER_START),
            ]
        )
        answers = [self._text(config.answer_median)]
        if rng.random() < config.regenerate_part:
            answers.append(self._text(config.answer_median))
        made = [
            TraceRequest(
                kind if i == 0 else "regenerated",
                np.concatenate([prompt, answer]),
                len(prompt),
                chat.marks,
            )
            for i, answer in enumerate(answers)
        ]
        chat.context = np.concatenate([made[-1].tokens, self._markup(_MESSAGE_END)])
        chat.past.append(chat.context)
        chat.turns_left -= 1
        if len(chat.context) > config.max_tokens:
            chat.turns_left = 0
        return made

    def _completion(self) -> TraceRequest:
        template = self._templates[int(self._rng.integers(len(self._templates)))]
        prompt = np.concatenate([template, self._text(self.config.message_median)])
        answer = self._text(self.config.answer_median)
        return TraceRequest("completion", np.concatenate([prompt, answer]), len(prompt))

    def _one_off(self) -> TraceRequest:
        prompt, answer = self._text(self.config.tool_result_median), self._text(100)
        return TraceRequest("one-off", np.concatenate([prompt, answer]), len(prompt))


def make_trace(config: TraceConfig) -> list[TraceRequest]:
    """The trace of a configuration; equal configurations give equal traces."""
    return TraceGenerator(config).requests()


def summary(trace: Sequence[TraceRequest]) -> dict[str, Any]:
    """Requests by kind, tokens of prompts and answers."""
    prompts = [request.num_prompt for request in trace]
    return {
        "requests": len(trace),
        "kinds": dict(Counter(request.kind for request in trace)),
        "prompt_tokens": sum(prompts),
        "answer_tokens": sum(len(r.tokens) - r.num_prompt for r in trace),
        "median_prompt": int(np.median(prompts)),
        "longest_prompt": max(prompts),
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of `TraceConfig`."""
    for field in dataclasses.fields(TraceConfig):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default)


def config_of(args: argparse.Namespace) -> TraceConfig:
    names = [field.name for field in dataclasses.fields(TraceConfig)]
    return TraceConfig(**{name: vars(args)[name] for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_flags(parser)
    config = config_of(parser.parse_args())
    print(json.dumps(summary(make_trace(config)), indent=2))


if __name__ == "__main__":
    main()
