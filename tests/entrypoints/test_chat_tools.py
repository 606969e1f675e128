# SPDX-License-Identifier: Apache-2.0
"""Tool calls and reasoning over HTTP, with the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.entrypoints.scripted_engine import ScriptedEngine
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontEndArgs

try:
    import httpx2 as http  # newer releases of the client build on it
except ImportError:
    import httpx as http  # type: ignore[no-redef]

pytestmark = pytest.mark.asyncio

MakeApi = Callable[..., openai.AsyncOpenAI]

HI: list = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city"],
    "$defs": {"Days": {"type": "integer"}},
}
TOOLS: list = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: dict = {"type": "function", "function": {"name": "weather"}}
HERMES = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
LIST = (
    '[{"name": "weather", "parameters": {"city": "Köln", "days": 2}},\n'
    ' {"name": "now", "parameters": {}}]'
)
CALLS = [("weather", '{"city": "Köln", "days": 2}'), ("now", "{}")]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest_asyncio.fixture
async def make_api(engine: ScriptedEngine) -> AsyncIterator[MakeApi]:
    """Makes clients of servers with the given `FrontEndArgs`."""
    clients = []

    def make(**args: Any) -> openai.AsyncOpenAI:
        app = build_app(engine, FrontEndArgs(**args))  # type: ignore[arg-type]
        transport = http.ASGITransport(app=app)
        client = http.AsyncClient(transport=transport, base_url="http://server")
        clients.append(
            openai.AsyncOpenAI(
                api_key="k", base_url="http://server/v1", http_client=client, max_retries=0
            )
        )
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


def auto(parser: str, **more: Any) -> dict[str, Any]:
    return {"enable_auto_tool_choice": True, "tool_call_parser": parser, **more}


async def ask(api: openai.AsyncOpenAI, **body: Any) -> Any:
    """The first choice of a reply."""
    reply = await api.chat.completions.create(**{"model": "fake", "messages": HI, **body})
    return reply.choices[0]


async def ask_streaming(api: openai.AsyncOpenAI, **body: Any) -> Any:
    """The first choice of a stream, put together by the client library."""
    async with api.chat.completions.stream(**{"model": "fake", "messages": HI, **body}) as stream:
        return (await stream.get_final_completion()).choices[0]


async def chunks_of(api: openai.AsyncOpenAI, **body: Any) -> list[Any]:
    """Every chunk's first choice."""
    body = {"model": "fake", "messages": HI, "stream": True, **body}
    return [chunk.choices[0] async for chunk in await api.chat.completions.create(**body)]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]


@pytest.mark.parametrize(
    ("parser", "script", "choice", "content"),
    [
        ("hermes", HERMES, None, "Let me see."),
        ("hermes", HERMES, "auto", "Let me see."),
        ("qwen3_coder", CODER, "auto", None),
        ("hermes", LIST, "required", None),
    ],
)
async def test_calls_are_the_same_streamed_or_not(
    make_api: MakeApi,
    engine: ScriptedEngine,
    parser: str,
    script: str,
    choice: str | None,
    content: str | None,
) -> None:
    api = make_api(**auto(parser))
    engine.script = script
    body = {"tools": TOOLS} if choice is None else {"tools": TOOLS, "tool_choice": choice}
    whole = await ask(api, **body)
    assert (whole.message.content, calls_of(whole)) == (content, CALLS)
    assert whole.finish_reason == "tool_calls"
    ids = {call.id for call in whole.message.tool_calls}
    assert len(ids) == 2 and {call.type for call in whole.message.tool_calls} == {"function"}
    for engine.piece in (1, 3, 40, 1000):
        streamed = await ask_streaming(api, **body)
        assert (streamed.message.content or None, calls_of(streamed)) == (content, CALLS)
        assert streamed.finish_reason == "tool_calls"


async def test_chunks_of_calls(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = HERMES
    opening, *choices = await chunks_of(make_api(**auto("hermes")), tools=TOOLS)
    assert opening.delta.role == "assistant" and opening.delta.content == ""
    entries = [entry for choice in choices for entry in choice.delta.tool_calls or []]
    begun = [entry for entry in entries if entry.id]
    assert [(entry.index, entry.function.name) for entry in begun] == [(0, "weather"), (1, "now")]
    assert all(entry.type == "function" for entry in begun)
    rest = [entry for entry in entries if not entry.id]
    assert all(entry.type is None and entry.function.name is None for entry in rest)
    assert len(rest) > 10  # arguments come piece by piece
    assert all(choice.delta.model_dump(exclude_unset=True) for choice in choices[:-1])
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


async def test_required_calls_are_constrained(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = LIST
    api = make_api()  # needs no parser
    for parallel in (True, False):
        choice = await ask(api, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
        assert calls_of(choice) == CALLS[: 2 if parallel else 1]
        constraint = engine.calls[-1].params.structured_outputs
        assert constraint is not None and isinstance(constraint.json, str)
        schema = json.loads(constraint.json)
        assert schema["type"] == "array" and schema["minItems"] == 1
        assert ("maxItems" in schema) is not parallel
        names = [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]]
        assert names == [["weather"], ["now"]]
        moved = schema["$defs"]["tool0"]
        assert moved["properties"]["days"] == {"$ref": "#/$defs/tool0/$defs/Days"}
        assert moved["required"] == ["city"]


async def test_named_calls_are_constrained(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = '{"city": "Köln"}'
    api = make_api()
    for request in (ask, ask_streaming):
        choice = await request(api, tools=TOOLS, tool_choice=NAMED)
        assert calls_of(choice) == [("weather", engine.script)]
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        constraint = engine.calls[-1].params.structured_outputs
        assert constraint is not None and json.loads(str(constraint.json)) == WEATHER


def allowing(*names: str, mode: str = "auto") -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


async def test_only_allowed_tools_are_shown(make_api: MakeApi, engine: ScriptedEngine) -> None:
    api = make_api(**auto("hermes"))
    engine.script = HERMES
    for request in (ask, ask_streaming):
        choice = await request(api, tools=TOOLS, tool_choice=allowing("now"))
        assert engine.calls[-1].prompt["prompt"] == "[user]hi<now>[assistant]"
        assert engine.calls[-1].params.structured_outputs is None
        assert choice.finish_reason == "tool_calls"
    engine.script = '[{"name": "now", "parameters": {}}]'
    choice = await ask(api, tools=TOOLS, tool_choice=allowing("now", mode="required"))
    assert calls_of(choice) == CALLS[1:]
    assert engine.calls[-1].prompt["prompt"] == "[user]hi<now>[assistant]"
    constraint = engine.calls[-1].params.structured_outputs
    assert constraint is not None and "weather" not in str(constraint.json)
    engine.script = "no"
    assert (await ask(api, tools=TOOLS, tool_choice=allowing())).message.content == "no"
    assert engine.calls[-1].prompt["prompt"] == "[user]hi[assistant]"


async def test_forced_calls_after_reasoning(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = 'hm</think>{"city": "Köln"}'
    api = make_api(reasoning_parser="deepseek_r1")
    choice = await ask(api, tools=TOOLS, tool_choice=NAMED)
    assert calls_of(choice) == [("weather", '{"city": "Köln"}')]
    assert choice.message.reasoning == "hm"
    constraint = engine.calls[-1].params.structured_outputs
    assert constraint is not None and constraint.json is None
    tag = json.loads(str(constraint.structural_tag))
    assert tag["format"]["elements"][-1] == {"type": "json_schema", "json_schema": WEATHER}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    await ask(api, tools=TOOLS, tool_choice=NAMED, extra_body=off)
    constraint = engine.calls[-1].params.structured_outputs
    assert constraint is not None and json.loads(str(constraint.json)) == WEATHER


async def test_text_only(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = HERMES
    api = make_api(**auto("hermes"))
    for body in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        choice = await ask(api, **body)
        assert choice.message.content == HERMES and choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
    engine.script = "\nNo <tools> needed. "
    for request in (ask, ask_streaming):
        choice = await request(api, tools=TOOLS)
        assert choice.message.content == engine.script and not choice.message.tool_calls
        assert choice.finish_reason == "stop"


async def test_only_one_call_without_parallel_calls(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    engine.script = HERMES
    for request in (ask, ask_streaming):
        choice = await request(make_api(**auto("hermes")), tools=TOOLS, parallel_tool_calls=False)
        assert calls_of(choice) == CALLS[:1]


async def test_what_a_second_call_would_be_is_left_out_although_it_is_cut(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    """As it is where the reply is streamed, or the call complete."""
    engine.script = HERMES[: HERMES.rindex("{}") + 1]
    api = make_api(**auto("hermes"))
    for request in (ask, ask_streaming):
        choice = await request(api, tools=TOOLS, parallel_tool_calls=False)
        assert calls_of(choice) == CALLS[:1]
        assert "<tool_call>" not in (choice.message.content or "")


LISTED = {"type": "array"}
CUT_CALLS = [
    ("hermes", HERMES, "auto"),
    ("qwen3_coder", CODER, "auto"),
    ("hermes", LIST, "required"),
    ("hermes", '{"city": "Köln", "days": 2}', NAMED),
]


@pytest.mark.parametrize(("parser", "script", "choice"), CUT_CALLS)
async def test_a_call_cut_by_the_limit_is_content(
    make_api: MakeApi, engine: ScriptedEngine, parser: str, script: str, choice: Any
) -> None:
    """Wherever a reply ends, its calls are complete, and nothing the model wrote is lost."""
    api = make_api(**auto(parser))
    engine.finish_reason = "length"
    for end in range(1, len(script)):
        engine.script = script[:end]
        found = await ask(api, tools=TOOLS, tool_choice=choice)
        assert found.finish_reason == "length"
        calls = calls_of(found)
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        if not calls:
            assert (found.message.content or "").strip() == script[:end].strip()
        elif len(calls) == 1 and choice != NAMED:
            assert (found.message.content or "").count("weather") == 0


@pytest.mark.parametrize(("parser", "script", "choice"), CUT_CALLS)
async def test_a_stop_string_within_a_call_is_the_reason_of_the_end(
    make_api: MakeApi, engine: ScriptedEngine, parser: str, script: str, choice: Any
) -> None:
    """Streamed or not, wherever it cuts: `tool_calls` is the reason of a reply with whole calls."""
    api = make_api(**auto(parser))
    engine.piece = 7
    reasons = set()
    for end in range(len(script), 0, -5):
        engine.script = script[:end]
        whole = await ask(api, tools=TOOLS, tool_choice=choice)
        streamed = await ask_streaming(api, tools=TOOLS, tool_choice=choice)
        expected = "tool_calls" if whole.message.tool_calls else "stop"
        assert whole.finish_reason == streamed.finish_reason == expected, script[:end]
        reasons.add(expected)
    assert reasons == {"stop", "tool_calls"}


async def test_a_stream_has_sent_the_call_that_is_cut(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    engine.script, engine.finish_reason = HERMES[: HERMES.index("ln")], "length"
    choices = await chunks_of(make_api(**auto("hermes")), tools=TOOLS)
    entries = [entry for choice in choices for entry in choice.delta.tool_calls or []]
    assert "".join(entry.function.arguments for entry in entries) == '{"city": "Kö'
    assert choices[-1].finish_reason == "length"
    engine.piece = 1000  # all of it in one piece
    choices = await chunks_of(make_api(**auto("hermes")), tools=TOOLS)
    assert not any(choice.delta.tool_calls for choice in choices)
    assert "".join(choice.delta.content or "" for choice in choices) == engine.script


@pytest.mark.parametrize("choice", [NAMED, "required"])
@pytest.mark.parametrize(
    ("script", "reasoning", "content"),
    [
        ("<thin", None, "<thin"),
        ("<think>hm", "hm", None),
        ('<think>hm</think>\n{"ci', "hm", '{"ci'),
        ("<think>hm</think>\n\n", "hm", "\n\n"),
    ],
)
async def test_a_forced_call_that_does_not_come(
    make_api: MakeApi,
    engine: ScriptedEngine,
    choice: Any,
    script: str,
    reasoning: str | None,
    content: str | None,
) -> None:
    engine.script, engine.finish_reason = script, "length"
    api = make_api(reasoning_parser="qwen3")
    found = await ask(api, tools=TOOLS, tool_choice=choice)
    assert not found.message.tool_calls and found.finish_reason == "length"
    assert found.message.reasoning == reasoning
    assert (found.message.content or "").strip() == (content or "").strip()


async def test_choices_are_independent(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = ["just text" + " " * 200, HERMES]
    api = make_api(**auto("hermes"))
    body: dict[str, Any] = {"model": "fake", "messages": HI, "tools": TOOLS, "n": 2}
    reply = await api.chat.completions.create(**body)
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "tool_calls"]
    async with api.chat.completions.stream(**body) as stream:
        streamed = (await stream.get_final_completion()).choices
    assert calls_of(streamed[1]) == calls_of(reply.choices[1]) == CALLS
    assert streamed[0].message.content == reply.choices[0].message.content == engine.script[0]
    assert not calls_of(streamed[0])


async def test_tokens_of_text_kept_back(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = HERMES
    choices = await chunks_of(
        make_api(**auto("hermes")),
        tools=TOOLS,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    logprobs = [one for c in choices if c.logprobs for one in c.logprobs.content]
    assert len(logprobs) == len(HERMES)
    ids = [one for c in choices for one in (c.model_extra or {}).get("token_ids", [])]
    assert len(ids) == len(HERMES)


@pytest.mark.parametrize(
    ("script", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "\nhm\n", "\n\nyes"),
        ("<think>hm", "hm", None),
        ("yes", None, "yes"),
        ("<think></think>yes", None, "yes"),
    ],
)
async def test_reasoning(
    make_api: MakeApi,
    engine: ScriptedEngine,
    script: str,
    reasoning: str | None,
    content: str | None,
) -> None:
    engine.script = script
    api = make_api(reasoning_parser="qwen3")
    message = (await ask(api)).message
    assert (message.reasoning, message.content) == (reasoning, content)
    choices = await chunks_of(api)
    deltas = [choice.delta for choice in choices]
    assert "".join(d.content or "" for d in deltas) == (content or "")
    pieces = [(d.model_extra or {}).get("reasoning", "") for d in deltas]
    assert "".join(pieces) == (reasoning or "")
    hidden = (await ask(api, extra_body={"include_reasoning": False})).message
    assert (hidden.reasoning, hidden.content or None) == (None, content)


async def test_the_prompt_says_where_reasoning_begins(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    engine.script = "hm</think>yes"
    api = make_api(reasoning_parser="qwen3")
    for thinking, expected in ((True, ("hm", "yes")), (False, (None, engine.script))):
        body = {"chat_template_kwargs": {"enable_thinking": thinking}}
        message = (await ask(api, extra_body=body)).message
        assert (message.reasoning, message.content) == expected
    begun = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "<think>a"}]}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    message = (await ask(api, messages=begun, extra_body=body)).message
    assert (message.reasoning, message.content) == ("hm", "yes")


async def test_space_between_reasoning_and_a_constrained_answer_is_of_neither(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    engine.script = "<think>hm\n</think>\n\nyes\n"
    api = make_api(reasoning_parser="qwen3")
    body: dict[str, Any] = {"extra_body": {"structured_outputs": {"choice": ["yes\n", "no"]}}}
    for engine.piece in (1, 3, 1000):
        for request in (ask, ask_streaming):
            message = (await request(api, max_tokens=300, **body)).message
            assert message.content == "yes\n"
    engine.script = "\nyes"  # what has no reasoning before it is the constraint's alone
    body["extra_body"] |= {"chat_template_kwargs": {"enable_thinking": False}}
    assert (await ask(api, max_tokens=300, **body)).message.content == "\nyes"


async def test_reasoning_before_calls(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = f"<think>say <tool_call>?</think>\n\n{HERMES}"
    api = make_api(**auto("hermes", reasoning_parser="qwen3"))
    for request in (ask, ask_streaming):
        choice = await request(api, tools=TOOLS)
        assert calls_of(choice) == CALLS and choice.finish_reason == "tool_calls"
        assert choice.message.content.strip() == "Let me see."


async def test_history_reaches_the_template(make_api: MakeApi, engine: ScriptedEngine) -> None:
    engine.script = HERMES
    api = make_api(**auto("hermes", reasoning_parser="qwen3"))
    message = (await ask(api, tools=TOOLS)).message
    call_ids = [call.id for call in message.tool_calls]
    results = [{"role": "tool", "tool_call_id": i, "content": "rain"} for i in call_ids]
    earlier = {**message.to_dict(), "reasoning": "hm"}
    await ask(api, messages=[*HI, earlier, *results], tools=TOOLS)
    assert engine.calls[-1].prompt["prompt"] == (
        "[user]hi[assistant]<think>hm</think>Let me see.(weather city=Köln days=2)(now)"
        "[tool]rain[tool]rain<weather><now>[assistant]"
    )


async def test_tags_that_are_special_tokens_are_kept(
    make_api: MakeApi, engine: ScriptedEngine
) -> None:
    api = make_api(**auto("hermes"))
    await ask(api, tools=TOOLS)
    assert engine.calls[-1].params.skip_special_tokens
    assert engine.tokenizer is not None
    engine.tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    api = make_api(**auto("hermes"))
    await ask(api, tools=TOOLS)
    assert not engine.calls[-1].params.skip_special_tokens
    await ask(api)
    assert engine.calls[-1].params.skip_special_tokens


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": TOOLS}, "tools", "--tool-call-parser .harmony, hermes, "),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tools", "--enable-auto-tool-choice"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no tool 'x'; the tools are weather, now",
        ),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", '"none", "auto", "required"'),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "not supported"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "weather"}}},
            "tool_choice",
            "not supported",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowing("now", "x")},
            "tool_choice.allowed_tools.tools.1",
            "no tool 'x'",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowing("now", mode="none")},
            "tool_choice.allowed_tools.mode",
            '"auto" or "required"',
        ),
        ({"tools": TOOLS, "tool_choice": allowing(mode="required")}, "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.allowed_tools.tools",
            "list the allowed",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            "tool_choice.allowed_tools",
            "an object",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", '"function"'),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.function.name", "two tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools.0.function.parameters",
            "JSON schema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": LISTED}}]},
            "tools.0.function.parameters",
            "schema of an object",
        ),
        (
            {"tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "json_object"}},
            "response_format",
            "forced call",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(
    make_api: MakeApi, engine: ScriptedEngine, body: dict, param: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as error:
        await make_api(tool_call_parser="hermes").chat.completions.create(
            model="fake", messages=HI, stream=stream, **body
        )
    assert error.value.param == param
    assert not engine.calls
