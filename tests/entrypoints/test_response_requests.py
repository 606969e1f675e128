# SPDX-License-Identifier: Apache-2.0
"""Requests to `/v1/responses`: how they become chat requests, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from tests.entrypoints.response_bodies import THINKING, TOOL
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.translate import encode_reasoning, to_chat
from vllm.exceptions import VLLMValidationError


def chat_of(**body: Any) -> Any:
    return to_chat(ResponsesRequest.model_validate({"input": "hi", **body}))


def refusal_of(**body: Any) -> VLLMValidationError:
    with pytest.raises(VLLMValidationError) as refused:
        chat_of(**body)
    return refused.value


def test_a_conversation_of_items_is_a_conversation_of_messages() -> None:
    part = {"type": "input_text", "text": "and?"}
    chat = chat_of(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "In English."}]},
            {"role": "user", "content": "weather?"},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [
                {"type": "reasoning_text", "text": "I look."}]},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [
                {"type": "output_text", "text": "Let me see.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "w", "arguments": '{"city": "A"}'},
            {"type": "function_call", "call_id": "c2", "name": "w", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "7"},
            {"type": "function_call_output", "call_id": "c2", "output": [part]},
            {"type": "message", "role": "user", "content": [part]},
        ],
    )  # fmt: skip
    call = {"type": "function", "function": {"name": "w", "arguments": {"city": "A"}}}
    assert chat.messages == [
        {"role": "system", "content": "Be brief.\n\nIn English."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "reasoning": "I look.",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "c1", **call},
                {"id": "c2", "type": "function", "function": {"name": "w", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "tool", "tool_call_id": "c2", "content": "and?"},
        {"role": "user", "content": [part]},
    ]


def test_what_follows_a_turn_begins_the_next_one() -> None:
    items = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
    assert chat_of(input=[*items, thought]).messages == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "reasoning": "t"},
    ]


def test_encrypted_reasoning_is_read_where_there_is_no_other() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": encode_reasoning("größer")}
    assert chat_of(input=[item]).messages == [{"role": "assistant", "reasoning": "größer"}]


def test_fields_get_the_chat_apis_names() -> None:
    chat = chat_of(
        max_output_tokens=5,
        temperature=0.5,
        top_k=3,
        stop=["x"],
        cache_salt="s",
        user="u",
        stream=True,
        stream_options={"include_obfuscation": False},
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        tools=[TOOL],
        parallel_tool_calls=False,
        **THINKING,
    )
    assert (chat.max_tokens, chat.temperature, chat.top_k, chat.stop) == (5, 0.5, 3, ["x"])
    assert (chat.cache_salt, chat.user, chat.stream, chat.stream_options) == ("s", "u", True, None)
    assert chat.reasoning_effort == "low" and chat.chat_template_kwargs == {"enable_thinking": True}
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}},
    }
    function = {key: value for key, value in TOOL.items() if key != "type"}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.parallel_tool_calls is False and chat.tool_choice is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        (
            {"type": "function", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
            "required",
        ),
    ],
)
def test_tool_choice(choice: Any, expected: Any) -> None:
    chat = chat_of(tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=choice)
    names = [tool["function"]["name"] for tool in chat.tools]
    allowed = isinstance(choice, dict) and choice["type"] == "allowed_tools"
    assert chat.tool_choice == expected
    assert names == (["weather"] if allowed else ["weather", "other"])


@pytest.mark.parametrize(
    ("body", "parameter", "instead"),
    [
        ({"store": True}, "store", "store=false"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation"),
        ({"background": True}, "background", "stream=true"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "shorten"),
        ({"truncation": "auto"}, "truncation", "shorten"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"n": 2}, "n", "several times"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "/v1/chat/completions"),
        ({"kv_transfer_params": {}}, "kv_transfer_params", "/v1/chat/completions"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "instructions"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
        ({"include": ["everything"]}, "include", "reasoning.encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "run it in the client"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", '"required"'),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "name"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": ["weather"]}],
                },
            },
            "tool_choice.tools.0",
            "no tool",
        ),
        ({"input": []}, "input", "at least one"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "the item itself"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", "function_call_output"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input.0.role", "developer"),
        ({"input": [{"role": "user"}]}, "input.0.content", "needs content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input.0.content.0",
            "only text",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input.0.arguments",
            "JSON",
        ),
        (
            {"input": [{"type": "function_call_output", "output": "x"}]},
            "input.0.call_id",
            "call_id",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-_"}]},
            "input.0.encrypted_content",
            "leave the item out",
        ),
    ],
)
def test_refusals_name_the_field_and_what_to_do_instead(
    body: dict[str, Any], parameter: str, instead: str
) -> None:
    refused = refusal_of(**body)
    assert refused.parameter == parameter and instead in refused.message


def test_every_field_that_the_client_knows_is_known_here() -> None:
    """The rest is about OpenAI's own accounts, tiers and tools."""
    known = set(ResponseCreateParamsStreaming.__annotations__)
    assert known - ResponsesRequest.model_fields.keys() == {
        *("access_programs", "background_options", "image", "max_tool_calls"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier"),
    }


@pytest.mark.parametrize(
    "body",
    [
        {"store": False},
        {"background": False, "truncation": "disabled", "service_tier": "auto"},
        {"text": {"verbosity": "medium", "format": {"type": "text"}}},
        {"include": ["file_search_call.results"], "n": 1, "metadata": {"a": "b"}},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(body: dict[str, Any]) -> None:
    assert chat_of(**body).messages == [{"role": "user", "content": "hi"}]
