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


@pytest.mark.parametrize(("max_tokens", "kept"), [(16, 48), (1, 63), (None, 63), (64, 1)])
def test_truncation_leaves_room_for_the_output(processor, max_tokens, kept):
    keep_last = {"truncate_prompt_tokens": -1}
    params = SamplingParams(max_tokens=max_tokens)
    made = process(processor, list(range(100)), params, tokenization_kwargs=keep_last)
    assert made.prompt_token_ids == list(range(100 - kept, 100))


@pytest.mark.parametrize("keep", [0, -2, 65, 1.5, True, 10**30])
def test_truncation_to_what_cannot_be(processor, keep):
    with pytest.raises(VLLMValidationError, match="truncate_prompt_tokens must be") as caught:
        process(processor, tokenization_kwargs={"truncate_prompt_tokens": keep})
    assert caught.value.parameter == "truncate_prompt_tokens"


CONTRADICTIONS = [
    ({"allowed_token_ids": [2], "min_tokens": 4, "stop_token_ids": [2]}, "allowed_token_ids"),
    ({"allowed_token_ids": [0], "min_tokens": 1}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("fields", "parameter"), CONTRADICTIONS)
def test_contradictions_are_refused(processor, fields, parameter):
    with pytest.raises(VLLMValidationError, match="min_tokens bar every token") as caught:
        process(processor, params=SamplingParams(**fields))
    assert caught.value.parameter == parameter
    more = fields["allowed_token_ids"] + [9]
    assert process(processor, params=SamplingParams(**fields | {"allowed_token_ids": more}))
    constrained = StructuredOutputsParams(regex="a")
    assert process(processor, params=SamplingParams(**fields, structured_outputs=constrained))


def test_a_banned_word_may_not_be_all_that_is_allowed(processor, tokenizer):
    (letter,) = tokenizer.encode("q", add_special_tokens=False)
    allowed = {"bad_words": ["q"], "allowed_token_ids": [letter]}
    with pytest.raises(VLLMValidationError, match="bad_words bar every token"):
        process(processor, params=SamplingParams(**allowed))
    allowed["bad_words"] = ["qq"]
    assert process(processor, params=SamplingParams(**allowed)), "the second one is barred later"


@pytest.mark.parametrize("name", ["bad_words_token_ids", "eos_token_ids"])
def test_internal_fields_are_the_engines(processor, name):
    params = SamplingParams()
    setattr(params, name, [[5]] if "words" in name else [5])
    with pytest.raises(VLLMValidationError, match="filled in by the engine") as caught:
        process(processor, params=params)
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("params", "kwargs", "parameter"),
    [
        ({"stop": ["\ud800"]}, {}, "sampling_params"),
        ({"bad_words": ["\ud800"]}, {}, "bad_words"),
        ({"bad_words": [" "]}, {}, "bad_words"),
        ({"extra_args": {"a": 2**64}}, {}, "sampling_params"),
        ({"extra_args": {"a": object}}, {}, "sampling_params"),
        ({}, {"cache_salt": "\udfff"}, "cache_salt"),
        ({}, {"trace_headers": {"traceparent": "\ud800"}}, "trace_headers"),
        ({}, {"priority": 2**64}, "priority"),
    ],
)
def test_what_cannot_be_sent_is_refused(processor, params, kwargs, parameter):
    with pytest.raises(VLLMValidationError) as caught:
        process(processor, params=SamplingParams(**params), **kwargs)
    assert caught.value.parameter == parameter


def test_a_word_of_a_novels_length_is_refused_before_it_is_tokenised(processor):
    with pytest.raises(VLLMValidationError, match="40000 characters; at most 512"):
        process(processor, params=SamplingParams(bad_words=["a" * 40_000]))


def test_parameters_are_not_shared_where_connectors_write(processor):
    params = SamplingParams(extra_args={"mine": {"a": 1}}, logit_bias={3: 1.0})
    made = process(processor, params=params).sampling_params
    made.extra_args["mine"]["a"] = 2
    assert params.extra_args == {"mine": {"a": 1}}
    assert made.logit_bias is params.logit_bias, "nobody writes into lists, which may be long"


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


@pytest.mark.parametrize(
    ("drafts", "text"),
    [
        ([VOCAB_SIZE], "outside the vocabulary"),
        ([3, -1], "outside the vocabulary"),
        ([3, True], "must be a list of token ids"),
        (["3"], "must be a list of token ids"),
        ("345", "must be a list of token ids"),
        ({"3": 4}, "must be a list of token ids"),
    ],
)
def test_bad_drafts(tokenizer, drafts, text):
    processor = InputProcessor(make_vllm_config(max_model_len=64, num_drafts=3), tokenizer)
    with pytest.raises(VLLMValidationError, match=text) as caught:
        process(processor, params=SamplingParams(extra_args={"draft_token_ids": drafts}))
    assert caught.value.parameter == "draft_token_ids"


def test_drafts_need_a_drafter(processor, tokenizer):
    given = SamplingParams(extra_args={"draft_token_ids": [3, VOCAB_SIZE - 1]})
    with pytest.raises(VLLMValidationError, match="--speculative-config method replay") as caught:
        process(processor, params=given)
    assert caught.value.parameter == "draft_token_ids"
    process(processor, params=SamplingParams(extra_args={"draft_token_ids": None}))
    drafting = InputProcessor(make_vllm_config(max_model_len=64, num_drafts=3), tokenizer)
    for params in (given, SamplingParams(extra_args={"draft_token_ids": []})):
        sent = process(drafting, params=params).sampling_params
        assert sent.extra_args == params.extra_args
