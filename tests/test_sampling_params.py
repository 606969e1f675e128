# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: defaults, ranges, normalisation, wire form."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingType,
    StructuredOutputsParams,
)
from vllm.sampling_validation import NUMBERS

DEFAULTS = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "skip_reading_prefix_cache": False,
}

GOOD: list[dict[str, Any]] = [
    {"presence_penalty": -2},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 0.01},
    {"temperature": 2},
    {"temperature": 0},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"top_k": 10**9},
    {"min_p": 1},
    {"seed": 0},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop": "x"},
    {"stop": ["a", "bc"]},
    {"stop_token_ids": [0, 5]},
    {"max_tokens": 1, "min_tokens": 1},
    {"max_tokens": None, "min_tokens": 99},
    {"logprobs": 0},
    {"logprobs": -1},
    {"prompt_logprobs": -1},
    {"logit_bias": {3: -100, 4: 100.0}},
    {"allowed_token_ids": [1]},
    {"bad_words": ["no"]},
    {"extra_args": {"kv_transfer_params": {"include_output_tokens": True}}},
    {"n": 16384},
]

NAN, INF = float("nan"), float("inf")
BAD: list[tuple[str, Any]] = [
    *(("presence_penalty", v) for v in (-2.1, 2.1, NAN, INF, "1", True, None)),
    *(("frequency_penalty", v) for v in (-2.1, 2.1, NAN, -INF, [1])),
    *(("repetition_penalty", v) for v in (0, -1, NAN, INF, "a", True)),
    *(("repetition_penalty", v) for v in (1e39, 1e300, 101, 1e-39, 10**400)),
    *(("temperature", v) for v in (-0.1, 2.1, NAN, INF, "0.5", False, None)),
    *(("top_p", v) for v in (0, -0.1, 1.1, NAN, "1")),
    *(("top_k", v) for v in (-2, 1.5, "3", True, NAN, 2**64)),
    *(("min_p", v) for v in (-0.1, 1.1, NAN, True)),
    *(("n", v) for v in (0, -1, 1.0, "2", True, 16385)),
    *(("seed", v) for v in (2**63, -(2**63) - 1, 1.0, "1", True)),
    *(("max_tokens", v) for v in (0, -1, 2.0, "5", True, 2**31, 10**4000)),
    *(("min_tokens", v) for v in (-1, 17, 1.5, None)),
    *(("logprobs", v) for v in (-2, 1.0, "1", True)),
    *(("prompt_logprobs", v) for v in (-2, 1.0, "1", True)),
    *(("stop", v) for v in ("", ["a", ""], [1], 5, ("a",))),
    *(("stop_token_ids", v) for v in ([-1], ["a"], [True], 5, [1, 2**64])),
    *(("bad_words", v) for v in ([""], [3], "word")),
    *(("allowed_token_ids", v) for v in ([], [-1], ["a"])),
    *(("logit_bias", v) for v in ({1: 101}, {1: NAN}, {-1: 0}, {"1": 0}, [1], {1: "a"})),
    *(("extra_args", v) for v in ([1], "x")),
    *((name, v) for name in ("ignore_eos", "detokenize", "skip_special_tokens") for v in (1, "t")),
    ("flat_logprobs", True),
    ("logprob_token_ids", [1]),
    ("thinking_token_budget", 5),
    ("repetition_detection", {"max_pattern_size": 3}),
]


def test_defaults() -> None:
    params = SamplingParams()
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("given", GOOD, ids=str)
def test_accepted_and_survives_the_wire(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    encoded = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(encoded, type=SamplingParams) == params


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert isinstance(caught.value, ValueError)


def test_every_number_has_a_range() -> None:
    """Internal and unsupported fields aside; a new float must not reach the device unchecked."""
    kinds = ("int", "float", "int | None", "float | None")
    fields = SamplingParams.__annotations__.items()
    numbers = {name for name, kind in fields if kind in kinds}
    assert numbers - set(NUMBERS) == {"thinking_token_budget"}
    for name, numbers_of in NUMBERS.items():
        if numbers_of.integer:
            assert -(2**63) <= numbers_of.low and numbers_of.high < 2**63, name
        else:
            assert -100 <= numbers_of.low and numbers_of.high <= 100, name


def test_messages_stay_short() -> None:
    for fields in (
        {"allowed_token_ids": ["x" * 50] * 10**5},
        {"seed": 10**4000},
        {"logit_bias": "x" * 10**6},
        {"stop_token_ids": [10**4000]},
    ):
        with pytest.raises(VLLMValidationError) as caught:
            SamplingParams(**fields)
        assert len(caught.value.message) < 500


def test_greedy_ignores_truncation_and_needs_one_sample() -> None:
    params = SamplingParams(temperature=9e-6, top_p=0.5, top_k=3, min_p=0.2)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.sampling_type is SamplingType.GREEDY
    with pytest.raises(VLLMValidationError, match="n must be 1"):
        SamplingParams(temperature=0, n=2)
    assert SamplingParams(temperature=1.1e-5, top_k=3).top_k == 3


def test_sampling_type_follows_seed() -> None:
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=3).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams(seed=-1).seed is None


def test_stop_needs_text() -> None:
    with pytest.raises(VLLMValidationError, match="stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)
    SamplingParams(stop_token_ids=[3], detokenize=False)


def test_prompt_logprobs_skip_cache_reads() -> None:
    assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache is True
    explicit = SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)
    assert explicit.skip_reading_prefix_cache is False
    assert SamplingParams(skip_reading_prefix_cache=True).skip_reading_prefix_cache is True


def test_from_optional() -> None:
    params = SamplingParams.from_optional(
        temperature=None, n=None, max_tokens=None, logit_bias={"5": 200, "6": -1}, stop=None
    )
    assert params.temperature == 1 and params.n == 1 and params.max_tokens is None
    assert params.logit_bias == {5: 100.0, 6: -1.0}
    with pytest.raises(VLLMValidationError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"a": 1})
    with pytest.raises(TypeError):
        SamplingParams.from_optional(tempreature=1)


@pytest.mark.parametrize(
    ("eos", "own", "ignore", "stops", "all_stops"),
    [
        ([7, 8], 7, False, [3, 8], {3, 7, 8}),
        (7, 7, False, [3], {3, 7}),
        (9, None, False, [3, 9], {3, 9}),
        ([7, 8], 7, True, [3], {3, 7, 8}),
        (None, 7, False, [3], {3, 7}),
    ],
)
def test_update_from_generation_config(
    eos: Any, own: int | None, ignore: bool, stops: list[int], all_stops: set[int]
) -> None:
    params = SamplingParams(stop_token_ids=[3], ignore_eos=ignore)
    params.update_from_generation_config({"eos_token_id": eos}, own)
    assert params.stop_token_ids == stops
    assert params.all_stop_token_ids == all_stops


def test_clone_is_deep() -> None:
    params = SamplingParams(extra_args={"a": {"b": 1}}, stop=["x"])
    twin = params.clone()
    assert twin == params
    assert twin.extra_args is not None and params.extra_args is not None
    twin.extra_args["a"]["b"] = 2
    assert params.extra_args["a"]["b"] == 1
    assert copy.copy(params) == params


@pytest.mark.parametrize("given", [{}, {"json": "{}", "regex": "a"}, {"choice": ["a"], "json": {}}])
def test_structured_outputs_need_exactly_one(given: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="exactly one"):
        StructuredOutputsParams(**given)


def test_structured_outputs_accept_one() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    encoded = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(encoded, type=SamplingParams) == params


def test_beam_search_params() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    assert (params.temperature, params.length_penalty, params.ignore_eos) == (0.0, 1.0, False)


def test_n_limit_is_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "2")
    SamplingParams(n=2)
    with pytest.raises(VLLMValidationError, match="VLLM_MAX_N_SEQUENCES"):
        SamplingParams(n=3)


GRAMMAR = StructuredOutputsParams(regex="[a-z]+")


@pytest.mark.parametrize(
    ("fields", "ending", "on_device"),
    [
        ({}, {2, 9}, [2, 9]),
        ({"ignore_eos": True}, {9}, [9]),
        ({"min_tokens": 4}, {2, 9}, []),
        ({"structured_outputs": GRAMMAR}, {2, 9}, [2, 9]),
        # Before the grammar begins, after reasoning, an end of sequence does not end the text.
        ({"structured_outputs": GRAMMAR, "ignore_eos": True}, {2, 9}, []),
    ],
)
def test_the_device_knows_only_tokens_that_always_end_the_text(
    fields: dict[str, Any], ending: set[int], on_device: list[int]
) -> None:
    params = SamplingParams(max_tokens=8, stop_token_ids=[9], **fields)
    params.eos_token_ids = [2]
    assert params.ending_token_ids == ending
    assert params.device_stop_ids == on_device
