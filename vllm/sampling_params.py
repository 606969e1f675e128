# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of a request: fields, normalisation and construction."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm.sampling_validation import (
    SAMPLING_EPS,
    check_beam_search_params,
    check_sampling_params,
    fail,
)

__all__ = [
    "INTERNAL_FIELDS",
    "SAMPLING_EPS",
    "BeamSearchParams",
    "ReasoningBudget",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]

#: fields of `SamplingParams` that only the engine's front end fills in
INTERNAL_FIELDS = ("eos_token_ids", "bad_words_token_ids")


class SamplingType(enum.IntEnum):
    """How a request picks its tokens."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(enum.Enum):
    """What each `RequestOutput` of a stream holds."""

    #: everything generated so far
    CUMULATIVE = 0
    #: only what is new since the last one
    DELTA = 1
    #: one output, at the end
    FINAL_ONLY = 2


class ReasoningBudget(msgspec.Struct, frozen=True):
    """How many tokens the reasoning before a constrained answer may take.

    It lies between the texts `begin` (empty where the prompt has opened it) and `end`; after
    `max_tokens` generated tokens `end` follows.
    """

    begin: str
    end: str
    max_tokens: int

    def __post_init__(self) -> None:
        good = 0 < len(self.end) <= 64 and len(self.begin) <= 64 and self.max_tokens >= 0
        if not good or not (self.begin + self.end).isprintable():
            fail(
                "structured_outputs",
                "structured_outputs.reasoning needs a begin and an end of at most 64 printable "
                "characters, not empty the latter, and max_tokens of at least 0",
                self,
            )


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """A constraint on the generated text; exactly one of the first six fields must be set.

    `reasoning` bounds reasoning that the constraint itself allows before the answer.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    reasoning: ReasoningBudget | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            fail(
                "structured_outputs",
                f"structured_outputs needs exactly one of {', '.join(kinds)}; got {got}",
                given,
            )


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """How to generate from one prompt; follows the OpenAI completions API where that has a name.

    A `temperature` below 1e-5 means greedy: `top_p`, `top_k` and `min_p` are then ignored and `n`
    must be 1. `top_k` 0 or -1 is off. `logprobs`/`prompt_logprobs` count the returned
    alternatives, -1 meaning the whole vocabulary. `extra_args` travels to the engine untouched;
    its key `kv_transfer_params` is read by KV connectors.

    Raises `VLLMValidationError` (a `ValueError`) naming the parameter when a value is out of range
    or of the wrong type.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    #: None: skipped exactly when `prompt_logprobs` is set (cached positions have no logits)
    skip_reading_prefix_cache: bool | None = None
    flat_logprobs: bool = False
    logprob_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
    #: end-of-sequence ids beyond `stop_token_ids`; all of them are barred below `min_tokens`
    eos_token_ids: list[int] | None = None
    #: token sequences of `bad_words`, filled in by the engine's front end
    bad_words_token_ids: list[list[int]] | None = None
    #: of a supernet: the mixer of each layer, a short form or an alias; None: the engine's
    placement: str | list[str] | None = None

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1 and not isinstance(self.top_k, bool):
            self.top_k = 0
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        self.stop_token_ids = self.stop_token_ids or []
        self.bad_words = self.bad_words or []
        check_sampling_params(self)
        if self.temperature < SAMPLING_EPS:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    @classmethod
    def from_optional(cls, **kwargs: Any) -> SamplingParams:
        """Like the constructor, but None means the default and `logit_bias` may come from JSON.

        JSON turns the token ids of `logit_bias` into strings; values are clamped to
        [-100, 100] as the OpenAI API does.
        """
        given = {k: v for k, v in kwargs.items() if v is not None or k == "max_tokens"}
        if (bias := given.get("logit_bias")) is not None:
            given["logit_bias"] = _parse_logit_bias(bias)
        return cls(**given)

    @property
    def sampling_type(self) -> SamplingType:
        if self.temperature < SAMPLING_EPS:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Every id that ends the text: `stop_token_ids` and the end-of-sequence ids."""
        return {*(self.stop_token_ids or ()), *(self.eos_token_ids or ())}

    @property
    def ending_token_ids(self) -> set[int]:
        """The ids that end this request's text: without the end-of-sequence ids if those are
        ignored, which ends no grammar."""
        if self.ignore_eos and self.structured_outputs is None:
            return set(self.stop_token_ids or ())
        return self.all_stop_token_ids

    @property
    def device_stop_ids(self) -> list[int]:
        """Those of `ending_token_ids` that end the text in whichever step they are sampled and that
        the device knows: none with `min_tokens`, nor where end-of-sequence ids that are ignored end
        a grammar, which may begin after reasoning only; 8 at most."""
        if self.min_tokens or (self.ignore_eos and self.structured_outputs is not None):
            return []
        return sorted(self.ending_token_ids)[:8]

    @property
    def penalises(self) -> bool:
        """Whether tokens seen before count for or against a token."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits are changed by rules on single tokens or on the output so far."""
        return bool(
            self.logit_bias
            or self.allowed_token_ids
            or self.bad_words_token_ids
            or self.min_tokens
            or self.penalises
        )

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], model_eos_token_id: int | None = None
    ) -> None:
        """Adopt the checkpoint's end-of-sequence ids.

        Ids other than the tokenizer's own become stop ids unless `ignore_eos`; all are remembered
        for `min_tokens`.
        """
        found = generation_config.get("eos_token_id")
        eos = [found] if isinstance(found, int) else list(found or ())
        extra = [token for token in dict.fromkeys(eos) if token != model_eos_token_id]
        if extra and not self.ignore_eos:
            self.stop_token_ids = list(dict.fromkeys([*(self.stop_token_ids or ()), *extra]))
        main = [] if model_eos_token_id is None else [model_eos_token_id]
        self.eos_token_ids = [*main, *extra]

    def shallow_copy(self) -> SamplingParams:
        """A copy whose lists and objects are shared: nobody may change what is inside."""
        return copy.copy(self)

    def clone(self) -> SamplingParams:
        """A deep copy, for callers that change what is inside."""
        return copy.deepcopy(self)


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Parameters of `LLM.beam_search`.

    Beams are ranked by `logprob / length ** length_penalty`, the model's own probabilities and the
    number of generated tokens. `temperature` 0 and 1 both mean that; any other value is refused.
    `include_stop_str_in_output` keeps the end-of-sequence token. Raises `VLLMValidationError`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_beam_search_params(self)


def _parse_logit_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    parsed: dict[int, float] = {}
    for key, value in bias.items():
        try:
            token, number = int(key), float(value)
        except (TypeError, ValueError):
            fail(
                "logit_bias", f"logit_bias maps token ids to numbers; got {key!r}: {value!r}", bias
            )
        parsed[token] = min(100.0, max(-100.0, number))
    return parsed
