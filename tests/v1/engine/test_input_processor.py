# SPDX-License-Identifier: Apache-2.0
"""Validation: what reaches the engine, and what each error says."""

from __future__ import annotations

import pytest

from tests.v1.engine.fakes import EOS, VOCAB_SIZE, make_vllm_config
from vllm.config import KVTransferConfig
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor


@pytest.fixture
def processor(tokenizer):
    return InputProcessor(make_vllm_config(max_model_len=64), tokenizer)


def process(processor, prompt=(1, 2, 3), params=None, **kwargs):
    prompt = list(prompt) if isinstance(prompt, tuple) else prompt
    params = params or SamplingParams()
    return processor.process("id", prompt, params, **kwargs).request


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "empty"),
        ("", "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([1, -1], r"token id -1 is outside the vocabulary \[0, 1000\)"),
        ([1, VOCAB_SIZE], "token id 1000 is outside"),
        ([1, True], "must be integers, got True"),
        ([1, 2.0], "must be integers, got 2.0"),
        ([1, "2"], "must be integers"),
        ([1] * 64, "^This model's maximum context length is 64 tokens"),
        (5, "a prompt must be text"),
        (None, "a prompt must be text"),
        ({}, "needs 'prompt' or 'prompt_token_ids'"),
        ({"prompt": 5}, "'prompt' must be text"),
        ({"prompt_token_ids": "abc"}, "must be a list of integers"),
        ({"prompt_embeds": object()}, "prompt_embeds are not supported"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multimodal input is not supported"),
        ({"encoder_prompt": "a", "prompt": "b"}, "encoder-decoder"),
    ],
)
def test_bad_prompts(processor, prompt, text):
    with pytest.raises(VLLMValidationError, match=text) as caught:
        process(processor, prompt)
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize(
    ("params", "parameter", "text"),
    [
        ({"logprobs": 21}, "logprobs", "allows 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "allows 20"),
        ({"logprobs": -1}, "logprobs", "1000 alternatives"),
        ({"logit_bias": {1000: 1.0}}, "logit_bias", "outside the vocabulary"),
        ({"allowed_token_ids": [3, 1000]}, "allowed_token_ids", "outside the vocabulary"),
        ({"stop_token_ids": [1000]}, "stop_token_ids", "outside the vocabulary"),
        ({"min_tokens": 62, "max_tokens": 62}, "min_tokens", "^This model's maximum context"),
        (
            {"structured_outputs": StructuredOutputsParams(regex="(")},
            "structured_outputs",
            "not closed",
        ),
    ],
)
def test_bad_parameters(processor, params, parameter, text):
    with pytest.raises(VLLMValidationError, match=text) as caught:
        process(processor, params=SamplingParams(**params))
    assert caught.value.parameter == parameter


def test_a_schema_travels_as_text(processor):
    given = SamplingParams(structured_outputs=StructuredOutputsParams(json={"const": 2**80}))
    sent = process(processor, params=given).sampling_params
    assert sent.structured_outputs.json == f'{{"const": {2**80}}}'
    assert given.structured_outputs.json == {"const": 2**80}, "the caller's is not changed"


def test_other_arguments(processor):
    for kwargs, parameter in (
        ({"lora_request": LoRARequest("a", 1, "/x")}, "lora_request"),
        ({"priority": 3}, "priority"),
        ({"priority": True}, "priority"),
        ({"tokenization_kwargs": {"padding": True}}, "tokenization_kwargs"),
        ({"tokenization_kwargs": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
    ):
        with pytest.raises(VLLMValidationError) as caught:
            process(processor, **kwargs)
        assert caught.value.parameter == parameter
    with pytest.raises(VLLMValidationError, match="request_id"):
        processor.process(5, [1], SamplingParams())
    with pytest.raises(VLLMValidationError, match="SamplingParams"):
        processor.process("a", [1], {"max_tokens": 3})
    with pytest.raises(VLLMValidationError, match="cache_salt"):
        process(processor, {"prompt": "a", "cache_salt": ""})


def test_without_tokenizer_only_ids_pass():
    processor = InputProcessor(make_vllm_config(), None)
    assert process(processor).eos_token_id == EOS
    with pytest.raises(VLLMValidationError, match="skip-tokenizer-init"):
        process(processor, "text")
    constrained = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    for params in (SamplingParams(stop="a"), SamplingParams(bad_words=["a"]), constrained):
        with pytest.raises(VLLMValidationError, match="skip-tokenizer-init"):
            process(processor, params=params)


def test_forms_of_a_prompt(processor, tokenizer):
    ids = tokenizer.encode("hello world")
    for prompt in ("hello world", {"prompt": "hello world"}):
        assert process(processor, prompt).prompt_token_ids == ids
    given = processor.process("a", {"prompt_token_ids": [9, 8], "prompt": "x"}, SamplingParams())
    assert given.request.prompt_token_ids == [9, 8] and given.prompt_text == "x"
    salted = process(processor, {"prompt_token_ids": [9], "cache_salt": "s"})
    assert salted.cache_salt == "s"
    truncated = process(
        processor, list(range(100)), tokenization_kwargs={"truncate_prompt_tokens": -1}
    )
    assert truncated.prompt_token_ids == list(range(37, 100))


def test_parameters_are_completed_on_a_copy(processor, tokenizer):
    params = SamplingParams(max_tokens=None, bad_words=["fox"])
    request = process(processor, params=params)
    assert params.max_tokens is None and params.seed is None
    done = request.sampling_params
    assert done.max_tokens == 61 and 0 <= done.seed < 2**63
    assert done.bad_words_token_ids == [
        tokenizer.encode("fox", add_special_tokens=False),
        tokenizer.encode(" fox", add_special_tokens=False),
    ]
    assert process(processor, params=SamplingParams(seed=7)).sampling_params.seed == 7
    assert request.eos_token_id == tokenizer.eos_token_id


def test_eos_ids_of_the_generation_config_stop_unless_ignored(processor, tokenizer):
    processor._generation_config = {"eos_token_id": [tokenizer.eos_token_id, 77]}
    done = process(processor, params=SamplingParams(stop_token_ids=[5])).sampling_params
    assert done.stop_token_ids == [5, 77]
    assert done.all_stop_token_ids == {5, 77, tokenizer.eos_token_id}
    ignoring = process(processor, params=SamplingParams(ignore_eos=True)).sampling_params
    assert ignoring.stop_token_ids == []


def test_max_logprobs_unlimited():
    config = make_vllm_config()
    config.model_config.max_logprobs = -1
    assert process(InputProcessor(config, None), params=SamplingParams(logprobs=-1))


def test_internal_ids(processor, monkeypatch):
    request_id = processor.process("../a b/é", [1], SamplingParams()).request.request_id
    assert request_id[:-9] == ".._a_b__" and len(request_id.rsplit("-", 1)[1]) == 8
    long = processor.process("x" * 500, [1], SamplingParams()).request.request_id
    assert len(long) == 128 + 9
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert process(processor).request_id == "id"
    assert processor.process("..", [1], SamplingParams()).request.request_id == "request__"


def test_connector_parameters_need_a_connector(processor, tokenizer):
    params = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    with pytest.raises(VLLMValidationError, match="--kv-transfer-config") as caught:
        process(processor, params=params)
    assert caught.value.parameter == "kv_transfer_params"
    for nothing in (None, {}):
        process(processor, params=SamplingParams(extra_args={"kv_transfer_params": nothing}))
    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    config = make_vllm_config(max_model_len=64, kv_transfer_config=connector)
    made = process(InputProcessor(config, tokenizer), params=params)
    assert made.sampling_params.extra_args == params.extra_args
