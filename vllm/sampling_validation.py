# SPDX-License-Identifier: Apache-2.0
"""Range and type checks of `SamplingParams`, as tables."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from vllm import envs
from vllm.exceptions import VLLMValidationError

#: below this temperature sampling is greedy
SAMPLING_EPS = 1e-5


class Checked(Protocol):
    """What the checks read of `SamplingParams` besides fields that they look up by name."""

    n: int
    temperature: float
    stop: str | list[str] | None
    max_tokens: int | None
    min_tokens: int
    detokenize: bool
    structured_outputs: Any
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | None
    extra_args: dict[str, Any] | None
    bad_words_token_ids: list[list[int]] | None
    placement: str | list[str] | None

    @property
    def all_stop_token_ids(self) -> set[int]: ...


class CheckedBeam(Protocol):
    """The same of `BeamSearchParams`."""

    temperature: float


@dataclass(frozen=True)
class Range:
    """The numbers a parameter may have: all of `[low, high]`, or of `(low, high]`.

    What passes is exact enough as fp32 on the device, or fits int64 there and on the way to the
    engine. `rule` says it in words for error messages.
    """

    low: float
    high: float
    rule: str
    integer: bool = False
    optional: bool = False
    above_low: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise `VLLMValidationError` naming `name` unless `value` is in the range."""
        if value is None and self.optional:
            return
        kinds, word = (int, "an integer") if self.integer else (int | float, "a number")
        if isinstance(value, bool) or not isinstance(value, kinds):
            fail(name, f"{name} must be {word}, got {value!r}", value)
        # NaN is in no range. Whole numbers are compared as they are, however large.
        if not self.low <= value <= self.high or (self.above_low and value == self.low):
            fail(name, f"{name} must be {self.rule}, got {_shortened(value)}", value)


def _count(low: int, rule: str = "", *, optional: bool = False) -> Range:
    """An int32 of at least `low`."""
    most = 2**31 - 1
    return Range(low, most, rule or f"at least {low} and at most {most}", True, optional)


_LOGPROBS = _count(-1, "at least 0, or -1 for the whole vocabulary", optional=True)

#: every numeric field of `SamplingParams`; a field that is missing here is a failing test
NUMBERS: dict[str, Range] = {
    "presence_penalty": Range(-2, 2, "in [-2, 2]"),
    "frequency_penalty": Range(-2, 2, "in [-2, 2]"),
    "repetition_penalty": Range(0.01, 100, "in [0.01, 100]"),
    "temperature": Range(0, 2, "in [0, 2]"),
    "top_p": Range(0, 1, "in (0, 1]", above_low=True),
    "min_p": Range(0, 1, "in [0, 1]"),
    "n": _count(1),
    "top_k": _count(0, "-1, 0 (both: all tokens) or positive, and at most 2147483647"),
    "min_tokens": _count(0),
    "seed": Range(-(2**63), 2**63 - 1, "a 64-bit integer", integer=True, optional=True),
    "max_tokens": _count(1, optional=True),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
}
#: fields of `BeamSearchParams`
_BEAM_NUMBERS: dict[str, Range] = {
    "beam_width": _count(1),
    "max_tokens": _count(1),
    "length_penalty": Range(-10, 10, "in [-10, 10]"),
}
_BIAS = Range(-100, 100, "in [-100, 100]")
_TOKEN_ID = _count(0, "token ids of at least 0")
#: a request's scheduling priority
PRIORITY = Range(-(2**31), 2**31 - 1, "a 32-bit integer", integer=True)
_BOOLEANS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
)
#: accepted for compatibility of code that passes the default; any other value is refused
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "flat_logprobs": (False, "read `logprobs` as a list of dicts"),
    "logprob_token_ids": (None, "ask for the top `logprobs` and select from them"),
    "thinking_token_budget": (None, "bound the whole output with `max_tokens`"),
    "repetition_detection": (None, "use `repetition_penalty`"),
}


#: characters of a text and bits of a number that a message repeats
_SHOWN = 100
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _SHOWN


def fail(parameter: str, message: str, value: Any = None) -> NoReturn:
    """Raise the error for `parameter`."""
    raise VLLMValidationError(message, parameter=parameter, value=value)


def check_sampling_params(params: Checked) -> None:
    """Raise `VLLMValidationError` for the first bad field of `params`."""
    for name, numbers in NUMBERS.items():
        numbers.check(name, getattr(params, name))
    for name in _BOOLEANS:
        if not isinstance(getattr(params, name), bool):
            fail(name, f"{name} must be true or false, got {getattr(params, name)!r}")
    _check_lists(params)
    _check_mappings(params)
    _check_combinations(params)
    for name, (default, instead) in _UNSUPPORTED.items():
        if getattr(params, name) != default:
            fail(name, f"{name} is not supported; instead {instead}", getattr(params, name))


def check_some_token_is_left(params: Checked, vocab_size: int) -> None:
    """Raise `VLLMValidationError` where no token could be the first one.

    `params`: the engine's own, ids of end-of-sequence and banned words filled in.
    """
    barred = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    names = "bad_words" if barred else ""
    if params.min_tokens and params.structured_outputs is None:
        barred |= params.all_stop_token_ids
        names = "bad_words and min_tokens" if names else "min_tokens"
    allowed = params.allowed_token_ids
    if allowed is None and len(barred) < vocab_size:
        return
    if all(token in barred for token in allowed or range(vocab_size)):
        fail(
            "bad_words" if allowed is None else "allowed_token_ids",
            f"{names} bar every token that may be sampled: nothing could be generated",
        )


def check_beam_search_params(params: CheckedBeam) -> None:
    """Raise `VLLMValidationError` for the first bad field of `params`."""
    for name, numbers in _BEAM_NUMBERS.items():
        numbers.check(name, getattr(params, name))
    for name in ("ignore_eos", "include_stop_str_in_output"):
        if not isinstance(getattr(params, name), bool):
            fail(name, f"{name} must be true or false, got {getattr(params, name)!r}")
    if params.temperature not in (0, 1):
        fail(
            "temperature",
            "beam search ranks by the model's own probabilities: temperature must be 0 or 1 (the "
            f"same), got {params.temperature!r}; to sample, use generate",
            params.temperature,
        )


def _shortened(value: Any) -> str:
    """`value` for a message, whatever its length."""
    if isinstance(value, int) and value.bit_length() > _SHOWN:
        return f"a number of {value.bit_length()} bits"
    return _REPR.repr(value)


def _check_lists(params: Checked) -> None:
    for name, kind, word in (
        ("stop", str, "strings"),
        ("bad_words", str, "strings"),
        ("stop_token_ids", int, "token ids"),
        ("allowed_token_ids", int, "token ids"),
        ("eos_token_ids", int, "token ids"),
    ):
        value = getattr(params, name)
        if value is None:
            continue
        if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
            fail(name, f"{name} must be a list of {word}, got {_shortened(value)}", value)
        if kind is int and value:
            for extreme in (min(value), max(value)):
                _TOKEN_ID.check(name, extreme)
        if kind is str and "" in value:
            fail(name, f"{name} cannot contain an empty string", value)
    if params.allowed_token_ids == []:
        fail("allowed_token_ids", "allowed_token_ids must not be empty", [])


def _check_mappings(params: Checked) -> None:
    placement = params.placement
    names = placement if isinstance(placement, list) else [placement]
    if placement is not None and not all(isinstance(name, str) and name for name in names):
        fail("placement", f"placement must be text or a list of names, got {_shortened(placement)}")
    if params.extra_args is not None and not isinstance(params.extra_args, dict):
        fail("extra_args", f"extra_args must be an object, got {_shortened(params.extra_args)}")
    bias = params.logit_bias
    if bias is None:
        return
    if not isinstance(bias, dict):
        fail("logit_bias", f"logit_bias must map token ids to numbers, got {_shortened(bias)}")
    for token, value in bias.items():
        _TOKEN_ID.check("logit_bias", token)
        _BIAS.check("logit_bias", value)


def _check_combinations(params: Checked) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        fail(
            "min_tokens",
            f"min_tokens must be at most max_tokens={params.max_tokens}, got {params.min_tokens}",
            params.min_tokens,
        )
    limit = envs.VLLM_MAX_N_SEQUENCES
    if params.n > limit:
        fail("n", f"n must be at most {limit} (VLLM_MAX_N_SEQUENCES), got {params.n}", params.n)
    if params.temperature < SAMPLING_EPS and params.n > 1:
        fail("n", f"n must be 1 with greedy sampling (temperature 0), got {params.n}", params.n)
    if params.stop and not params.detokenize:
        fail("stop", "stop strings need detokenize=True; use stop_token_ids instead", params.stop)
