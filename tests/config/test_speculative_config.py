# SPDX-License-Identifier: Apache-2.0
"""SpeculativeConfig: the rules of hidden-state extraction."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.exceptions import VLLMValidationError

KEY = "eagle_aux_hidden_state_layer_ids"


def given(ids: Any = (1, 3), **changes: Any) -> dict[str, Any]:
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {KEY: ids}},
        **changes,
    }


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
    (given(disable_padded_drafter_batch=True), "disable_padded_drafter_batch"),
    (given(draft_tensor_parallel_size=2), "draft_tensor_parallel_size must be 1"),
    ({"method": "ngram"}, "ngram is not supported yet; supported: extract_hidden_states"),
    ({"method": "eagle3", "model": "x"}, "eagle3 is not supported yet"),
    ({"model": "draft"}, "drafting with model 'draft' is not supported yet"),
    ({}, "none is not supported yet"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_refused(llama: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message) as caught:
        make(ModelConfig(llama), values)
    assert (caught.value.parameter or "").startswith("speculative_config")
