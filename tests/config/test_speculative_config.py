# SPDX-License-Identifier: Apache-2.0
"""SpeculativeConfig: the rules of hidden-state extraction and of drafters."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.draft_methods import ALIASES, DRAFT_METHODS, NOT_SERVED, settings_of
from vllm.config.draft_methods.base import DraftSettings
from vllm.config.draft_methods.replay import ReplaySettings
from vllm.config.draft_methods.stated_keys import STATED_KEYS
from vllm.exceptions import VLLMValidationError
from vllm.utils.class_registry import resolve_class
from vllm.v1.spec_decode.drafter import Drafter

KEY = "eagle_aux_hidden_state_layer_ids"


def given(ids: Any = (1, 3), **changes: Any) -> dict[str, Any]:
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {KEY: ids}},
        **changes,
    }


def ngram(**changes: Any) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": 3, **changes}


def make(model: ModelConfig, values: dict[str, Any]) -> SpeculativeConfig:
    return SpeculativeConfig(
        **values, target_model_config=model, target_parallel_config=ParallelConfig()
    )


@pytest.mark.parametrize("ids", [[0], [4], [2, 2, 1, 4], [3, 1, 0]])
def test_draft_config(llama: str, ids: list[int]) -> None:
    model = ModelConfig(llama)
    speculative = make(model, given(ids))
    draft = speculative.draft_model_config
    assert draft is not model and draft.hf_text_config is model.hf_text_config
    assert getattr(draft.hf_config, KEY) == ids == speculative.extraction_layer_ids
    assert draft.hf_config.model_type == "extract_hidden_states"
    assert draft.hf_config.architectures == ["ExtractHiddenStatesModel"]
    assert draft.architectures == ["ExtractHiddenStatesModel"]
    assert draft.hf_config.hidden_size == model.hf_config.hidden_size
    assert draft.get_hidden_size() == model.get_hidden_size() and draft.dtype is model.dtype
    assert model.architectures == ["LlamaForCausalLM"]


def test_wrapper_target_keeps_its_text_config(hybrid: str) -> None:
    model = ModelConfig(hybrid)
    draft = make(model, given()).draft_model_config
    assert draft.hf_config.text_config is model.hf_config.text_config
    assert draft.get_hidden_size() == 64


def test_survives_pickling(hybrid: str) -> None:
    speculative = pickle.loads(pickle.dumps(make(ModelConfig(hybrid), given([1, 4]))))
    assert speculative.extraction_layer_ids == [1, 4]
    assert speculative.draft_model_config.hf_config.text_config.hidden_size == 64


def test_helpers(llama: str) -> None:
    speculative = make(ModelConfig(llama), given())
    assert speculative.uses_extract_hidden_states() and speculative.tokens_per_request == 2
    assert not speculative.use_eagle() and not speculative.uses_draft_model()
    assert not speculative.use_dflash() and not speculative.use_ngram_gpu()
    assert speculative.draft_parallel_config is speculative.target_parallel_config


BAD: list[tuple[dict[str, Any], str]] = [
    (given(num_speculative_tokens=2), "num_speculative_tokens must be 1"),
    (given(num_speculative_tokens=None), "num_speculative_tokens must be 1"),
    (given(draft_model_config=None), KEY + " must be set"),
    (given(draft_model_config={}), KEY + " must be set"),
    (given(draft_model_config={"hf_config": {}}), KEY + " must be set"),
    (given(draft_model_config={"hf_config": 3}), "hf_config must be an object"),
    (given(draft_model_config={"hf": {}}), "draft_model_config must be"),
    (given([]), KEY + " must be a non-empty list"),
    (given(3), KEY + " must be a non-empty list"),
    (given(["1"]), KEY + " must be a non-empty list"),
    (given([True]), KEY + " must be a non-empty list"),
    (given([5]), r"out of range: \[5\]; this model has 4 layers"),
    (given([-1, 2]), r"out of range: \[-1\]"),
    (given(model="x"), "there is no draft model"),
    (given(draft_tensor_parallel_size=2), "draft_tensor_parallel_size must be 1"),
    (given(prompt_lookup_max=3), "prompt_lookup_max does not go with method extract"),
    (given(drafter={"method": "replay"}), "num_speculative_tokens must be given"),
    (given(drafter={"method": "replay", "width": 3}), "unknown key 'width'"),
    (given(drafter=given()), "drafter must have another method"),
    ({"method": "guess"}, "guess is not supported; supported: extract_hidden_states, "),
    (given(drafter={"method": "suffix", "suffix_decoding_max_tree_depth": 3}), "use ngram"),
    ({}, "none is not supported"),
    ({"method": "replay"}, "num_speculative_tokens must be given with method replay"),
    ({"method": "replay", "num_speculative_tokens": 0}, "must be 1 to 15, got 0"),
    ({"method": "replay", "num_speculative_tokens": 16}, "must be 1 to 15, got 16"),
    (
        {"method": "replay", "num_speculative_tokens": 2, "model": "x"},
        "model does not go with method replay, which has num_speculative_tokens, full_width, "
        "acceptance, seed",
    ),
    ({"method": "replay", "num_speculative_tokens": 2, "acceptance": 2}, "must be 0 to 1, got 2"),
    ({"method": "ngram"}, "num_speculative_tokens must be given with method ngram"),
    (ngram(model="draft"), "model must be absent with method ngram"),
    (ngram(prompt_lookup_max=2, prompt_lookup_min=3), "must be at most prompt_lookup_max, 2; got"),
    (ngram(prompt_lookup_max=0), "prompt_lookup_max must be 1 to 64, got 0"),
    (ngram(draft_tensor_parallel_size=1), "draft_tensor_parallel_size does not go with"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_refused(llama: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message) as caught:
        make(ModelConfig(llama), values)
    parameter = caught.value.parameter or ""
    assert parameter.startswith("speculative_config") or parameter in (values["drafter"] or {})


def build(model: ModelConfig, values: dict[str, Any]) -> SpeculativeConfig:
    return SpeculativeConfig.of(values, model, ParallelConfig(), "--speculative-config")


@pytest.mark.parametrize("keys", [ngram(), given()])
def test_keys_that_say_what_is_done_anyway(llama: str, keys: dict[str, Any]) -> None:
    """As other releases' users write them; they change nothing, beside extraction either."""
    model = ModelConfig(llama, max_model_len=64, enforce_eager=True)
    stated = dict.fromkeys(STATED_KEYS) | {
        "disable_padded_drafter_batch": False,
        "enforce_eager": True,
        "max_model_len": 64,
        "parallel_drafting": False,
        "rejection_sample_method": "strict",
    }
    assert build(model, {**keys, **stated}).as_given() == build(model, keys).as_given()
    beside = build(model, given(drafter={**ngram(), **stated}))
    assert beside.draft_settings == SpeculativeConfig(**ngram()).draft_settings


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention_backend", "FLASH_ATTN", "must be absent: the drafter has the target's --att"),
        ("disable_by_batch_size", 8, "must be absent: each step verifies as many drafts as pay"),
        ("disable_padded_drafter_batch", True, "must be false: drafters always run on padded"),
        ("enforce_eager", True, "must be the target's, False: --enforce-eager is for the drafter"),
        ("max_model_len", 63, "must be a number from 64 on, the target's, .*; got 63"),
        ("max_model_len", "64", "must be a number from 64 on, the target's, .*; got '64'"),
        ("parallel_drafting", True, ": peagle is not supported; use dflash"),
        ("quantization", "fp8", "must be absent: .* give a checkpoint that is not quantised; got"),
        ("rejection_sample_method", "probabilistic", "must be strict: a draft is accepted if it"),
        ("tensor_parallel_size", 1, "must be absent; write draft_tensor_parallel_size instead"),
    ],
)
def test_keys_that_say_something_else(llama: str, key: str, value: Any, message: str) -> None:
    model = ModelConfig(llama, max_model_len=64)
    for keys in (ngram(**{key: value}), given(drafter=ngram(**{key: value}))):
        with pytest.raises(VLLMValidationError, match=f"speculative_config.{key} ?{message}"):
            build(model, keys)


def test_a_drafter_has_its_own_settings() -> None:
    speculative = SpeculativeConfig(method="replay", num_speculative_tokens=3, seed=5)
    assert speculative.draft_settings == ReplaySettings(num_speculative_tokens=3, seed=5)
    assert speculative.tokens_per_request == 4 and not speculative.uses_draft_model()
    assert pickle.loads(pickle.dumps(speculative)).draft_settings == speculative.draft_settings


@pytest.mark.parametrize("full_width", [False, True])
def test_full_width_goes_with_every_drafter_also_beside_extraction(
    llama: str, full_width: bool
) -> None:
    drafter: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
    drafter["full_width"] = full_width
    for speculative in (
        SpeculativeConfig(**drafter),
        make(ModelConfig(llama), given(drafter=drafter)),
    ):
        assert speculative.draft_settings.full_width == full_width


def test_extraction_with_a_drafter(llama: str) -> None:
    beside = {"method": "replay", "num_speculative_tokens": 4}
    speculative = make(ModelConfig(llama), given(drafter=beside))
    assert speculative.num_speculative_tokens == 1 and speculative.num_drafts == 4
    assert speculative.draft_settings == ReplaySettings(num_speculative_tokens=4)


@pytest.mark.parametrize("method", DRAFT_METHODS)
def test_every_method_names_its_classes(method: str) -> None:
    named = DRAFT_METHODS[method]
    settings = resolve_class(named.settings)
    assert issubclass(settings, DraftSettings) and settings.method == method
    assert issubclass(resolve_class(named.drafter), Drafter)
    allowed = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    assert {field.name for field in dataclasses.fields(settings) if field.init} <= allowed


@pytest.mark.parametrize("method", DRAFT_METHODS)
def test_no_number_of_drafts_is_not_zero(method: str) -> None:
    settings = resolve_class(DRAFT_METHODS[method].settings)
    with pytest.raises(VLLMValidationError, match="must be 1 to 15, got 0"):
        settings_of(method, {"num_speculative_tokens": 0})
    with pytest.raises(VLLMValidationError, match="must be 1 to 15, got 0"):
        settings(num_speculative_tokens=0)
    if settings.knows_num_tokens:
        assert settings(model="x").num_speculative_tokens is None
    else:
        with pytest.raises(VLLMValidationError, match=f"must be given with method {method}"):
            settings()


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_lengths_that_ngram_looks_up(keys: dict[str, int], lengths: tuple[int, int]) -> None:
    assert SpeculativeConfig(**ngram(**keys)).draft_settings.lengths == lengths


@pytest.mark.parametrize("keys", [{"method": "ngram_gpu"}, {"model": "ngram"}])
def test_other_names_of_ngram(keys: dict[str, str]) -> None:
    speculative = SpeculativeConfig(num_speculative_tokens=3, **keys)
    assert speculative.method == "ngram" and speculative.use_ngram_gpu()


def test_methods_that_are_known_and_not_served() -> None:
    """By name, as their users write them, with what to use instead."""
    written = ("eagle", "medusa", "mlp_speculator", "suffix", "peagle", "dflash2", "xpress")
    assert set(written) <= set(NOT_SERVED)
    assert not set(NOT_SERVED) & {*DRAFT_METHODS, *ALIASES}
    for method, instead in NOT_SERVED.items():
        with pytest.raises(VLLMValidationError) as caught:
            SpeculativeConfig(method=method, model="somewhere", num_speculative_tokens=3)
        said = f"speculative_config.method: {method} is not supported; use {instead}; supported: "
        assert str(caught.value).startswith(said)
        assert any(name in instead for name in DRAFT_METHODS) or "docs/" in instead


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model_type": "medusa", "medusa_num_heads": 4}, "medusa"),
        ({"model_type": "mlp_speculator", "n_predict": 3}, "mlp_speculator"),
        ({"model_type": "eagle", "architectures": ["EagleModel"]}, "eagle"),
        ({"model_type": "llama", "architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
    ],
)
def test_checkpoints_of_methods_that_are_not_served(
    config: dict[str, Any], method: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VLLMValidationError, match=f"method: {method} is not supported; use"):
        SpeculativeConfig(model=str(tmp_path), num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 3}}, "dflash"),
    ],
)
def test_checkpoints_that_can_be_converted(
    llama: str, config: dict[str, Any], method: str, tmp_path: Path
) -> None:
    """Another format of a method that is served; the method need not be said."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = f"speculators checkpoint of type {method} .*`speculators convert` makes one"
    with pytest.raises(VLLMValidationError, match=message):
        make(ModelConfig(llama), {"model": str(tmp_path), "num_speculative_tokens": 3})


@pytest.mark.parametrize(
    "name", ["mtp", "deepseek_mtp", "qwen3_5_mtp", "qwen3_next_mtp", "mimo_mtp", "glm4_moe_mtp"]
)
def test_names_of_mtp(llama: str, name: str) -> None:
    """All mean the head in the target's checkpoint; whose head is not known is refused by name."""
    asked = {"method": name, "num_speculative_tokens": 1}
    assert SpeculativeConfig(**asked).method == "mtp"
    with pytest.raises(VLLMValidationError, match="this one is llama. Use eagle3, draft_model or"):
        make(ModelConfig(llama), asked)
