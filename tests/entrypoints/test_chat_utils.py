# SPDX-License-Identifier: Apache-2.0
"""Messages to conversations, and the choice and inspection of chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.fake_engine import CHAT_TEMPLATE, byte_tokenizer
from vllm.entrypoints.chat_utils import (
    load_chat_template,
    parse_chat_messages,
    resolve_hf_chat_template,
)
from vllm.entrypoints.openai.conversation import ConversationRenderer
from vllm.exceptions import VLLMValidationError
from vllm.renderers import hf
from vllm.renderers.hf import (
    detect_content_format,
    knows_developers,
    resolve_chat_template,
    takes_arguments_as_text,
)

LOOPS = (
    "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
)
LOOPS_OVER_VARIABLE = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% for part in c | list %}{{ part.text }}{% endfor %}{% endfor %}"
)
GENERATION = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, "string"),
        (LOOPS, "openai"),
        (LOOPS_OVER_VARIABLE, "openai"),
        (GENERATION, "string"),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}",
            "string",
        ),
    ],
)
def test_content_format_is_seen_in_the_template(template: str, expected: str) -> None:
    assert detect_content_format(template) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, False),
        ("{{ '\n' + c['function']['arguments'] }}", True),
        ("{{ c.name ~ c.arguments }}", True),
        ("{% set a = c.function.arguments %}({{ a }})", True),
        ("{{ c.arguments | tojson }}{{ '(' + c.arguments | tojson }}", False),
        ("{% for k, v in c.arguments.items() %}{{ k }}{% endfor %}", False),
        ("{% if c.arguments is string %}{{ c.arguments }}{% endif %}", False),
        ("{% if c.arguments is not mapping %}{{ '' + c.arguments }}{% endif %}", False),
    ],
)
def test_the_form_of_arguments_is_seen_in_the_template(template: str, expected: bool) -> None:
    assert takes_arguments_as_text(template) is expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, False),
        ("{% if messages[0].role == 'developer' %}x{% endif %}", True),
        ("{% if m.role in ['system', 'developer'] %}x{% endif %}", True),
        ("<|start|>developer{{ 'You are a developer.' }}", False),
    ],
)
def test_roles_are_seen_in_the_template(template: str, expected: bool) -> None:
    assert knows_developers(template) is expected


def test_a_template_with_the_role_gets_it() -> None:
    template = "{% for m in messages %}{{ 'D' if m.role == 'developer' else 'S' }}{% endfor %}"
    messages = [{"role": "developer", "content": "x"}]
    for text, expected in ((template, "D"), (template.replace("developer", "system"), "D")):
        renderer = ConversationRenderer.make(byte_tokenizer(), text)
        assert renderer.render(renderer.parse(messages), False) == expected


def test_requests_do_not_parse_the_template_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes milliseconds, and every chat request asks."""
    questions = (detect_content_format, takes_arguments_as_text, knows_developers)
    template = "{{ messages[0]['content'] }} once"
    answers = [ask(template) for ask in questions]

    def parsed_again(text: str) -> None:
        raise AssertionError(f"{text!r} is parsed again")

    monkeypatch.setattr(hf, "parse_template", parsed_again)
    assert [ask(template) for ask in questions] == answers


def test_broken_template_is_a_clear_error() -> None:
    with pytest.raises(VLLMValidationError, match="not valid Jinja"):
        detect_content_format("{% for %}")


def test_choice_of_template() -> None:
    tokenizer = byte_tokenizer()
    assert resolve_chat_template(tokenizer) == CHAT_TEMPLATE
    assert resolve_chat_template(tokenizer, chat_template="{{ 1 }}", tools=None) == "{{ 1 }}"
    assert resolve_chat_template(byte_tokenizer(None), model_config=None) is None
    assert resolve_hf_chat_template is resolve_chat_template
    tokenizer.chat_template = {"default": "{{ 'd' }}", "tool_use": "{{ 't' }}"}
    assert resolve_chat_template(tokenizer) == "{{ 'd' }}"
    assert resolve_chat_template(tokenizer, "tool_use") == "{{ 't' }}"
    assert resolve_chat_template(tokenizer, tools=[{"type": "function"}]) == "{{ 't' }}"


def test_loading_a_template(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ x }}")
    assert load_chat_template(file) == "{{ x }}" == load_chat_template("{{ x }}")
    assert load_chat_template(None) is None
    with pytest.raises(VLLMValidationError, match="no-such.jinja"):
        load_chat_template("no-such.jinja")
    file.write_text("{% if %}")
    for wrong in (file, "{% if %}", "{{ x"):
        with pytest.raises(VLLMValidationError, match="the chat template is not valid Jinja"):
            load_chat_template(wrong)


def test_contents() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    message = {"role": "user", "content": parts, "name": "n"}
    (as_text,) = parse_chat_messages([message])
    assert as_text == {"role": "user", "content": "a\nb\nc", "name": "n"}
    (as_parts,) = parse_chat_messages([message], "openai")
    assert as_parts["content"] == [{"type": "text", "text": t} for t in "abc"]
    (plain,) = parse_chat_messages([{"role": "user", "content": "x"}], "openai")
    assert plain["content"] == [{"type": "text", "text": "x"}]


def test_keys_of_templates_pass_as_they_are() -> None:
    message = {"role": "system", "content": "x", "functions": "[1]", "prefix": False, "audio": None}
    (parsed,) = parse_chat_messages([message])
    assert parsed == {"role": "system", "content": "x", "functions": "[1]", "prefix": False}
    (parsed,) = parse_chat_messages([{"role": "assistant", "content": "x", "tool_calls": []}])
    assert "tool_calls" not in parsed


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_has_three_names(key: str) -> None:
    (message,) = parse_chat_messages([{"role": "assistant", "content": "x", key: "because"}])
    assert message["reasoning"] == message["reasoning_content"] == "because"
    assert message["thinking"] == "because"


def test_earlier_tool_calls() -> None:
    call: dict[str, Any] = {"id": "1", "type": "function"}
    call["function"] = {"name": "f", "arguments": '{"a": 1}'}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    assistant, tool = parse_chat_messages(messages)
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert assistant["content"] == "" and tool["tool_call_id"] == "1"
    assert call["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a":\t"é"}', '{"a":\t"é"}'), ({"a": "é"}, '{"a": "é"}'), (None, "{}"), ("", "{}")],
)
def test_arguments_as_text(arguments: Any, expected: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    (assistant,) = parse_chat_messages(messages, arguments_as_text=True)
    assert assistant["tool_calls"][0]["function"]["arguments"] == expected


def test_application() -> None:
    renderer = ConversationRenderer.make(byte_tokenizer(), template_kwargs={"extra": "E"})
    text = renderer.render(renderer.parse([{"role": "user", "content": "hi"}]), False)
    assert text == "<|im_start|>user\nhi<|im_end|>\nE"
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]
    renderer = ConversationRenderer.make(byte_tokenizer(), LOOPS)
    assert renderer.render(renderer.parse(parts), True) == "ab"


def test_conversation_cannot_reach_into_the_template_engine() -> None:
    renderer = ConversationRenderer.make(byte_tokenizer(), "{{ ''.__class__.mro() }}")
    with pytest.raises(VLLMValidationError, match="cannot render"):
        renderer.render([{"role": "user", "content": "x"}], True)
