# SPDX-License-Identifier: Apache-2.0
"""Every field that clients know is either honoured or refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.entrypoints.conftest import MakeClient
from tests.entrypoints.fake_engine import FakeAsyncLLM
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.completion import CompletionRequest
from vllm.entrypoints.openai.protocol.sampling import _FORMER_NAMES
from vllm.entrypoints.openai.protocol.token_generate import DetokenizeRequest, TokenizeRequest

pytestmark = pytest.mark.asyncio

#: field -> a value that a server must honour
COMMON: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 3,
    "min_tokens": 1,
    "n": 2,
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "prompt_logprobs": 1,
    "add_special_tokens": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "truncation_side": "right",
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "kv_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "cache_salt": "x",
    "priority": 1,
    "placement": "all-gdn",
    "request_id": "x",
    "response_format": {"type": "text"},
    "length_penalty": 1.0,
    "use_beam_search": False,
    "user": "x",
    "echo": True,
}
COMPLETION = {**COMMON, "logprobs": 1, "best_of": 1}
CHAT = {
    **COMMON,
    "logprobs": True,
    "max_completion_tokens": 3,
    "chat_template_kwargs": {"extra": "x"},
    "documents": [{"title": "x", "text": "y"}],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "include_reasoning": True,
    "reasoning_effort": "low",
    "modalities": ["text"],
    "verbosity": "medium",
}
#: field -> a value that is refused
REFUSED: dict[str, Any] = {
    "length_penalty": 2.0,
    "thinking_token_budget": 5,
    "repetition_detection": {"max_pattern_size": 3},
}
REFUSED_COMPLETION = {**REFUSED, "suffix": "x", "prompt_embeds": "AAAA", "best_of": 3}
REFUSED_CHAT = {
    **REFUSED,
    "chat_template": "{{ 1 }}",
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"a": 1},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x", "format": "wav"},
    "web_search_options": {},
    "moderation": {"model": "x"},
    "verbosity": "low",
}
HI = [{"role": "user", "content": "hi"}]
CASES = [("/v1/completions", {"prompt": "hi"}, name, value) for name, value in COMPLETION.items()]
CASES += [("/v1/chat/completions", {"messages": HI}, name, value) for name, value in CHAT.items()]
REFUSALS = [
    ("/v1/completions", {"prompt": "hi"}, name, value) for name, value in REFUSED_COMPLETION.items()
]
REFUSALS += [
    ("/v1/chat/completions", {"messages": HI}, name, value) for name, value in REFUSED_CHAT.items()
]


@pytest.mark.parametrize(("path", "body", "name", "value"), CASES)
async def test_accepted(
    client: httpx.AsyncClient, path: str, body: dict, name: str, value: object
) -> None:
    reply = await client.post(path, json={**body, name: value})
    assert reply.status_code == 200, reply.text
    assert (await client.post(path, json={**body, name: None})).status_code == 200


@pytest.mark.parametrize(("path", "body", "name", "value"), REFUSALS)
async def test_refused_by_name(
    client: httpx.AsyncClient, engine: FakeAsyncLLM, path: str, body: dict, name: str, value: object
) -> None:
    reply = await client.post(path, json={**body, name: value})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == name
    assert not engine.calls


async def test_stream_options(client: httpx.AsyncClient) -> None:
    for options in ({"include_usage": True}, {"continuous_usage_stats": True}, {}, None):
        body = {"prompt": "hi", "stream": True, "stream_options": options}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_every_field_that_the_client_knows_is_known_here() -> None:
    """The rest is about OpenAI's own accounts, tiers and stores, or a hint."""
    from openai.types.chat import completion_create_params as chats
    from openai.types.completion_create_params import CompletionCreateParamsStreaming

    chat = set(chats.CompletionCreateParamsStreaming.__annotations__)
    assert chat - ChatCompletionRequest.model_fields.keys() - _FORMER_NAMES.keys() == {
        *("metadata", "store", "service_tier", "safety_identifier", "prediction"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    }
    completion = set(CompletionCreateParamsStreaming.__annotations__)
    assert not completion - CompletionRequest.model_fields.keys()


async def test_no_documented_field_is_an_unknown_key() -> None:
    chat = {"messages", "stream_options", "top_logprobs", "add_generation_prompt", "tools"}
    chat |= {"continue_final_message", "structured_outputs"}
    known = ChatCompletionRequest.model_fields.keys()
    assert (CHAT.keys() | REFUSED_CHAT.keys() | chat) <= known
    completion = {"prompt", "stream_options", "structured_outputs"}
    known = CompletionRequest.model_fields.keys()
    assert (COMPLETION.keys() | REFUSED_COMPLETION.keys() | completion) <= known
    tokenize = {"prompt", "messages", "add_special_tokens", "return_token_strs", "tools", "model"}
    tokenize |= {"add_generation_prompt", "continue_final_message", "chat_template"}
    assert tokenize | {"chat_template_kwargs"} <= TokenizeRequest.model_fields.keys()
    assert {"tokens", "model"} <= DetokenizeRequest.model_fields.keys()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_unknown_keys_are_ignored(make_client: MakeClient, path: str) -> None:
    body = {"messages" if "chat" in path else "prompt": HI if "chat" in path else "hi"}
    reply = await make_client().post(path, json={**body, "no_such_key": {"a": [1]}})
    assert reply.status_code == 200
