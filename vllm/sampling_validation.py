# SPDX-License-Identifier: Apache-2.0
"""Range and type checks of `SamplingParams`, as tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from vllm import envs
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm.sampling_params import BeamSearchParams, SamplingParams

#: below this temperature sampling is greedy
SAMPLING_EPS = 1e-5
_INT64_MAX = 2**63 - 1

#: parameter -> (accepts, the rule in words); checked in this order
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "presence_penalty": (lambda v: -2 <= v <= 2, "in [-2, 2]"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "in [-2, 2]"),
    "repetition_penalty": (lambda v: v > 0, "greater than 0"),
    "temperature": (lambda v: 0 <= v <= 2, "in [0, 2]"),
    "top_p": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "min_p": (lambda v: 0 <= v <= 1, "in [0, 1]"),
}
_INTEGERS: dict[str, tuple[Callable[[int], bool], str]] = {
    "n": (lambda v: v >= 1, "at least 1"),
    "top_k": (lambda v: v >= 0, "-1, 0 (both: all tokens) or positive"),
    "min_tokens": (lambda v: v >= 0, "at least 0"),
}
_OPTIONAL_INTEGERS: dict[str, tuple[Callable[[int], bool], str]] = {
    "seed": (lambda v: -_INT64_MAX - 1 <= v <= _INT64_MAX, "a 64-bit integer"),
    "max_tokens": (lambda v: v >= 1, "at least 1"),
    "logprobs": (lambda v: v >= -1, "at least 0, or -1 for the whole vocabulary"),
    "prompt_logprobs": (lambda v: v >= -1, "at least 0, or -1 for the whole vocabulary"),
}
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


def fail(parameter: str, message: str, value: Any = None) -> NoReturn:
    """Raise the error for `parameter`."""
    raise VLLMValidationError(message, parameter=parameter, value=value)


def check_sampling_params(params: SamplingParams) -> None:
    """Raise `VLLMValidationError` for the first bad field of `params`."""
    for name, (accepts, rule) in _NUMBERS.items():
        _check_number(name, getattr(params, name), accepts, rule)
    for name, (check, rule) in _INTEGERS.items():
        _check_integer(name, getattr(params, name), check, rule)
    for name, (check, rule) in _OPTIONAL_INTEGERS.items():
        if getattr(params, name) is not None:
            _check_integer(name, getattr(params, name), check, rule)
    for name in _BOOLEANS:
        if not isinstance(getattr(params, name), bool):
            fail(name, f"{name} must be true or false, got {getattr(params, name)!r}")
    _check_lists(params)
    _check_mappings(params)
    _check_combinations(params)
    for name, (default, instead) in _UNSUPPORTED.items():
        if getattr(params, name) != default:
            fail(name, f"{name} is not supported; instead {instead}", getattr(params, name))


def check_beam_search_params(params: BeamSearchParams) -> None:
    """Raise `VLLMValidationError` for the first bad field of `params`."""
    for name in ("beam_width", "max_tokens"):
        _check_integer(name, getattr(params, name), lambda v: v >= 1, "at least 1")
    _check_number("length_penalty", params.length_penalty, math.isfinite, "finite")
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


def _check_number(name: str, value: Any, accepts: Callable[[float], bool], rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail(name, f"{name} must be a number, got {value!r}", value)
    if not math.isfinite(value) or not accepts(value):
        fail(name, f"{name} must be {rule}, got {value}", value)


def _check_integer(name: str, value: Any, accepts: Callable[[int], bool], rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        fail(name, f"{name} must be an integer, got {value!r}", value)
    if not accepts(value):
        fail(name, f"{name} must be {rule}, got {value}", value)


def _check_lists(params: SamplingParams) -> None:
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
        if not isinstance(value, list) or not all(
            isinstance(v, kind) and not isinstance(v, bool) for v in value
        ):
            fail(name, f"{name} must be a list of {word}, got {value!r}", value)
        if kind is int and any(v < 0 for v in value):
            fail(name, f"{name} must hold token ids of at least 0, got {value!r}", value)
        if kind is str and "" in value:
            fail(name, f"{name} cannot contain an empty string", value)
    if params.allowed_token_ids == []:
        fail("allowed_token_ids", "allowed_token_ids must not be empty", [])


def _check_mappings(params: SamplingParams) -> None:
    if params.extra_args is not None and not isinstance(params.extra_args, dict):
        fail("extra_args", f"extra_args must be an object, got {params.extra_args!r}")
    if params.logit_bias is None:
        return
    if not isinstance(params.logit_bias, dict):
        fail("logit_bias", f"logit_bias must map token ids to numbers, got {params.logit_bias!r}")
    for token, bias in params.logit_bias.items():
        _check_integer("logit_bias", token, lambda v: v >= 0, "keyed by token ids of at least 0")
        _check_number("logit_bias", bias, lambda v: -100 <= v <= 100, "in [-100, 100]")


def _check_combinations(params: SamplingParams) -> None:
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
