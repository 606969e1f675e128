# SPDX-License-Identifier: Apache-2.0
"""What the fuzzed requests ask: drawn from a seed, so that a failure can be run again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.tiny_models import VOCAB_SIZE
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

MAX_MODEL_LEN = 256
MAX_PROMPT = 180
LONGEST_OUTPUT = 40
SALTS = (None, None, None, "one", "two")

#: JSON that is short whatever the model says
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@dataclass(frozen=True, eq=False)
class Spec:
    """What decides a request's outputs: prompt and parameters."""

    prompt: tuple[int, ...]
    options: dict[str, Any]

    def params(self, **more: Any) -> SamplingParams:
        return SamplingParams(**{**self.options, **more})

    @property
    def n(self) -> int:
        return int(self.options.get("n", 1))


@dataclass(frozen=True)
class Conditions:
    """What must not change a request's outputs."""

    salt: str | None = None
    marks: tuple[int, ...] = ()
    pin_seconds: float = 0.0
    priority: int = 0
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_cache: bool = False

    def prompt(self, spec: Spec) -> TokensPrompt:
        prompt = TokensPrompt(prompt_token_ids=list(spec.prompt))
        if self.salt is not None:
            prompt["cache_salt"] = self.salt
        if self.marks:
            prompt["cache_checkpoints"] = list(self.marks)
        if self.pin_seconds:
            prompt["cache_pin_seconds"] = self.pin_seconds
        return prompt

    def params(self, spec: Spec) -> SamplingParams:
        more: dict[str, Any] = {"output_kind": self.output_kind}
        if self.skip_cache:
            more["skip_reading_prefix_cache"] = True
        return spec.params(**more)


@dataclass
class Workload:
    """Draws specs whose prompts share beginnings, and conditions for them."""

    rng: random.Random
    extracts: bool
    priorities: bool
    _prompts: list[tuple[int, ...]] = field(default_factory=list)

    def prompt(self) -> tuple[int, ...]:
        """New, or a cut of an earlier prompt (a fork) with something after it."""
        rng = self.rng
        own = tuple(
            rng.randrange(256) for _ in range(rng.choice((1, 2, 5, 15, 16, 17, 40, 64, 90)))
        )
        if self._prompts and rng.random() < 0.7:
            base = rng.choice(self._prompts)
            own = base[: rng.randint(1, len(base))] + own
        prompt = own[:MAX_PROMPT]
        self._prompts.append(prompt)
        return prompt

    def continue_from(self, spec: Spec, answer: list[int]) -> None:
        """The next turn of a conversation may follow."""
        self._prompts.append((*spec.prompt, *answer)[:MAX_PROMPT])

    def spec(self) -> Spec:
        rng = self.rng
        options: dict[str, Any] = {
            "max_tokens": rng.choice((1, 1, 2, 3, 5, 8, 12, 16, LONGEST_OUTPUT)),
            "temperature": 0.0,
            "ignore_eos": rng.random() < 0.7,
        }
        if rng.random() < 0.5:
            options |= {"temperature": rng.choice((0.5, 1.0, 2.0)), "seed": rng.randrange(1 << 40)}
            if rng.random() < 0.25 and not self.extracts:
                options["n"] = rng.randint(2, 3)
        extras = rng.sample(range(len(_EXTRAS)), rng.choice((0, 0, 1, 1, 2)))
        for index in sorted(extras):
            _EXTRAS[index](rng, options)
        if self.extracts:
            # Rows of prompt and answer: the file must hold exactly what the reply counts.
            wanted = {"include_output_tokens": rng.random() < 0.7}
            options["extra_args"] = {"kv_transfer_params": wanted}
        return Spec(self.prompt(), options)

    def conditions(self, spec: Spec) -> Conditions:
        rng = self.rng
        marks = (rng.randint(1, len(spec.prompt)),) if rng.random() < 0.2 else ()
        return Conditions(
            salt=rng.choice(SALTS),
            marks=marks,
            pin_seconds=rng.choice((0.0, 0.0, 0.0, 0.05, 0.3)),
            priority=rng.randint(-1, 1) if self.priorities else 0,
            output_kind=rng.choice(tuple(RequestOutputKind)),
            skip_cache=rng.random() < 0.05,
        )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.sample(range(256), count)


def _penalties(rng: random.Random, options: dict[str, Any]) -> None:
    options |= {
        "presence_penalty": rng.choice((0.0, 0.7)),
        "frequency_penalty": rng.choice((0.0, -0.5, 0.9)),
        "repetition_penalty": rng.choice((1.0, 0.8, 1.5)),
    }


def _filters(rng: random.Random, options: dict[str, Any]) -> None:
    options |= {"top_k": rng.choice((0, 1, 5, 50)), "top_p": rng.choice((1.0, 0.9, 0.3))}
    options["min_p"] = rng.choice((0.0, 0.05))


def _bias(rng: random.Random, options: dict[str, Any]) -> None:
    options["logit_bias"] = {token: rng.uniform(-20, 20) for token in _tokens(rng, 4)}


def _allowed(rng: random.Random, options: dict[str, Any]) -> None:
    options["allowed_token_ids"] = _tokens(rng, rng.choice((2, 30)))


def _bad_words(rng: random.Random, options: dict[str, Any]) -> None:
    options["bad_words"] = [chr(rng.randrange(97, 123)) * rng.choice((1, 2)) for _ in range(4)]


def _grammar(rng: random.Random, options: dict[str, Any]) -> None:
    grammars: list[Callable[[], StructuredOutputsParams]] = [
        lambda: StructuredOutputsParams(choice=["yes", "no", "perhaps"]),
        lambda: StructuredOutputsParams(regex=r"[a-c]{2,6}\d?"),
        lambda: StructuredOutputsParams(json=_SCHEMA),
    ]
    for name in ("allowed_token_ids", "logit_bias", "bad_words", "min_tokens", "stop_token_ids"):
        options.pop(name, None)
    options["structured_outputs"] = rng.choice(grammars)()


def _logprobs(rng: random.Random, options: dict[str, Any]) -> None:
    options["logprobs"] = rng.choice((0, 3))


def _prompt_logprobs(rng: random.Random, options: dict[str, Any]) -> None:
    options["prompt_logprobs"] = rng.choice((0, 2))


def _stop_tokens(rng: random.Random, options: dict[str, Any]) -> None:
    options["stop_token_ids"] = _tokens(rng, 40)


def _min_tokens(rng: random.Random, options: dict[str, Any]) -> None:
    options |= {"min_tokens": min(3, options["max_tokens"]), "ignore_eos": False}


#: in the order in which they are applied
_EXTRAS: tuple[Callable[[random.Random, dict[str, Any]], None], ...] = (
    _penalties,
    _filters,
    _bias,
    _allowed,
    _bad_words,
    _logprobs,
    _prompt_logprobs,
    _stop_tokens,
    _min_tokens,
    _grammar,
)
assert VOCAB_SIZE > 256


class Answers(Protocol):
    """What the model says to a spec."""

    def answer(self, spec: Spec) -> tuple[list[int], str]:
        """Tokens and text of its first completion."""
        ...


class SpecPool:
    """The specs of one engine: few, each asked for several times under other conditions."""

    def __init__(self, rng: random.Random, work: Workload, answers: Answers, size: int) -> None:
        self._rng = rng
        self._specs: list[Spec] = []
        for _ in range(size):
            spec = work.spec()
            tokens, text = answers.answer(spec)
            if rng.random() < 0.4:
                spec = with_stop(spec, text, rng)
            work.continue_from(spec, tokens)
            self._specs.append(spec)

    def draw(self) -> Spec:
        return self._rng.choice(self._specs)


def with_stop(spec: Spec, text: str, rng: random.Random) -> Spec:
    """The same with a stop string out of its text, whose end is near the request's own."""
    if spec.n > 1 or "structured_outputs" in spec.options or len(text) < 3:
        return spec
    end = rng.randint(2, len(text))
    options = dict(spec.options)
    options["stop"] = [text[max(0, end - rng.randint(1, 3)) : end]]
    options["include_stop_str_in_output"] = rng.random() < 0.3
    options["max_tokens"] = max(end + rng.choice((0, 1, 1, 2, 9)), options.get("min_tokens", 0))
    return Spec(spec.prompt, options)
