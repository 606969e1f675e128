# SPDX-License-Identifier: Apache-2.0
"""Requests to `/v1/messages` as chat requests: fields, blocks, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from vllm.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from vllm.entrypoints.anthropic.translate import to_chat
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    pass
from tests.entrypoints.message_bodies import HI, SCHEMA, THINK, TOOL


def chat_of(can_reason: bool = True, **body: Any) -> Any:
    body = {"messages": HI, "max_tokens": 5, **body}
    return to_chat(MessagesRequest.model_validate(body), can_reason)


def refusal_of(**body: Any) -> VLLMValidationError:
    with pytest.raises(VLLMValidationError) as refused:
        chat_of(**body)
    return refused.value


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_blocks_become_messages() -> None:
    marked = {**text("Be brief."), "cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "name": "weather"}
    chat = chat_of(
        system=[marked, text("In English.")],
        messages=[
            {"role": "user", "content": [text("weather?"), text("now")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I look.", "signature": "s"},
                    text("Let me "),
                    text("see."),
                    {**use, "id": "t1", "input": {"city": "A"}},
                    {**use, "id": "t2", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "7"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [text("no"), text("city")],
                        "is_error": True,
                    },
                    text("and?"),
                ],
            },
        ],
    )
    function = {"name": "weather", "arguments": {"city": "A"}}
    assert chat.messages == [
        {"role": "system", "content": "Be brief.\nIn English."},
        {"role": "user", "content": [text("weather?"), text("now")]},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning": "I look.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": function},
                {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "7"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no\ncity"},
        {"role": "user", "content": [text("and?")]},
    ]
    assert chat.add_generation_prompt and not chat.continue_final_message


def test_fields_get_the_chat_apis_names() -> None:
    chat = chat_of(
        stop_sequences=["x"],
        top_k=3,
        temperature=0.5,
        metadata={"user_id": "u"},
        output_config={
            "effort": "low",
            "format": {"type": "json_schema", "schema": {"type": "object"}},
        },
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        chat_template_kwargs={"other": 1},
    )
    assert (chat.stop, chat.top_k, chat.temperature, chat.user) == (["x"], 3, 0.5, "u")
    assert chat.reasoning_effort == "low" and chat.include_reasoning is False
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "object"}},
    }
    function = {"name": "weather", "parameters": SCHEMA, "description": "In a city."}
    assert chat.tools == [{"type": "function", "function": function}]
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("auto", False)
    assert chat.chat_template_kwargs == {"enable_thinking": True, "other": 1}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        (
            {"type": "tool", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
        ),
    ],
)
def test_tool_choice(choice: Any, expected: Any) -> None:
    assert chat_of(tools=[TOOL], tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize(
    ("thinking", "kwargs"),
    [
        (None, None),
        ({"type": "adaptive"}, None),
        ({"type": "disabled"}, {"enable_thinking": False}),
        (THINK, {"enable_thinking": True}),
    ],
)
def test_thinking_is_the_templates_variable(thinking: Any, kwargs: Any) -> None:
    assert chat_of(thinking=thinking).chat_template_kwargs == kwargs


def test_a_last_message_of_the_assistant_is_continued() -> None:
    chat = chat_of(messages=[*HI, {"role": "assistant", "content": "The answer is"}])
    assert chat.continue_final_message and not chat.add_generation_prompt


@pytest.mark.parametrize(
    ("body", "parameter", "instead"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"min_tokens": 9}, "min_tokens", "max_tokens"),
        ({"messages": []}, "messages", "at least one"),
        ({"stop": ["x"]}, "stop", "stop_sequences"),
        ({"response_format": {"type": "text"}}, "response_format", "output_config.format"),
        ({"n": 2}, "n", "several times"),
        ({"container": "c"}, "container", "in the client"),
        ({"mcp_servers": [{}]}, "mcp_servers", "in the client"),
        ({"context_management": {}}, "context_management", "in the client"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "input_schema"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "JSON schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "any"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "name"),
        (
            {"output_config": {"format": {"type": "xml"}}},
            "output_config.format.type",
            "json_schema",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "assistant"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "list of blocks"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0.type",
            "only text",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
            "messages.0.content.0",
            "leave the block out",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                    }
                ]
            },
            "messages",
            "tool_result",
        ),
        ({"can_reason": False, "thinking": THINK}, "thinking", "--reasoning-parser"),
    ],
)
def test_refusals_name_the_field_and_what_to_do_instead(
    body: dict[str, Any], parameter: str, instead: str
) -> None:
    refused = refusal_of(**body)
    assert refused.parameter == parameter and instead in refused.message


def test_every_field_that_the_client_knows_is_known_here() -> None:
    """The rest is about Anthropic's own accounts, tiers and cache."""
    from anthropic.types.message_create_params import MessageCreateParamsStreaming

    known = set(MessageCreateParamsStreaming.__annotations__)
    assert known - MessagesRequest.model_fields.keys() == {
        *("cache_control", "diagnostics", "inference_geo", "service_tier"),
        *("speed", "user_profile_id", "workspace_id"),
    }


def test_counting_needs_no_limit_but_a_message_does() -> None:
    CountTokensRequest.model_validate({"messages": HI})
    with pytest.raises(pydantic.ValidationError, match="max_tokens"):
        MessagesRequest.model_validate({"messages": HI})
