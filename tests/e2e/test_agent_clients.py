# SPDX-License-Identifier: Apache-2.0
"""Clients that agents are built with, unmodified, against one server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest

from tests.e2e.remote_server import RemoteServer

if TYPE_CHECKING:
    # It takes seconds to import, as `agents` does.
    import anthropic

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-qwen3_5-code"
SCRIPTS = Path(__file__).parent / "clients"
#: `make clients` puts it beside the environment of the tests
CLIENTS_PYTHON = Path(sys.prefix + "-clients") / "bin" / "python"
#: shows the tools and switches thinking as Qwen's templates do
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
UNIT: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
ASK = "Write a class"


@pytest.fixture(scope="module")
def server() -> Iterator[RemoteServer]:
    flags = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    parsers = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    parsers += ["--reasoning-parser", "qwen3"]
    # The small model would fill its limit with the spaces that JSON allows.
    parsers += ["--structured-outputs-config", '{"disable_any_whitespace": true}']
    names = ["--served-model-name", "tiny", "--api-key", "k"]
    with RemoteServer(MODEL, *flags, *parsers, *names, "--chat-template", TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def chat(server: RemoteServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: RemoteServer) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0)


@pytest.fixture(scope="module")
def text(chat: openai.OpenAI) -> str:
    """Twelve greedy tokens through the chat route."""
    messages: Any = [{"role": "user", "content": ASK}]
    reply = chat.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0
    )
    assert reply.choices[0].message.content
    return reply.choices[0].message.content


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*_client.py")))
def test_clients_with_an_environment_of_their_own(server: RemoteServer, script: str) -> None:
    if not CLIENTS_PYTHON.exists():
        assert "CI" not in os.environ, f"{CLIENTS_PYTHON} is missing: run `make clients`"
        pytest.skip("needs `make clients`")
    command = [CLIENTS_PYTHON, SCRIPTS / script, server.url, "tiny"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**env, "OPENAI_API_KEY": "k"}
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_responses(chat: openai.OpenAI, text: str) -> None:
    body: Any = {"model": "tiny", "input": ASK, "max_output_tokens": 12, "temperature": 0}
    whole = chat.responses.create(**body)
    assert (whole.output_text, whole.status) == (text, "incomplete")
    assert whole.usage is not None and whole.usage.output_tokens == 12
    events = list(chat.responses.create(**body, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    assert events[-1].type == "response.incomplete" and events[-1].response.usage == whole.usage
    assert chat.responses.input_tokens.count(model="tiny", input=ASK).input_tokens == (
        whole.usage.input_tokens
    )


def test_reasoning_and_calls_of_responses(chat: openai.OpenAI) -> None:
    thinking: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    with chat.responses.stream(
        model="tiny", input=ASK, max_output_tokens=8, temperature=0, **thinking
    ) as stream:
        kinds = [event.type for event in stream]
    assert "response.reasoning_text.delta" in kinds and kinds[-1] == "response.incomplete"
    tool: Any = {"type": "function", "name": "weather", "parameters": UNIT, "strict": True}
    with chat.responses.stream(
        model="tiny",
        input=ASK,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=60,
    ) as stream:
        reply = stream.get_final_response()
    call = reply.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments)["unit"] in ("C", "F")


def test_messages(claude: anthropic.Anthropic, text: str) -> None:
    greedy: Any = {"extra_body": {"temperature": 0}}
    body: Any = {"model": "tiny", "messages": [{"role": "user", "content": ASK}], **greedy}
    whole = claude.messages.create(**body, max_tokens=12)
    assert (whole.content[0].text, whole.stop_reason) == (text, "max_tokens")
    with claude.messages.stream(**body, max_tokens=12) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens == 12
    count = claude.messages.count_tokens(model="tiny", messages=body["messages"])
    usage = whole.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    stop = text[-3:]
    cut = claude.messages.create(**body, max_tokens=12, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]
    begun = [*body["messages"], {"role": "assistant", "content": text[:5]}]
    assert claude.messages.create(**{**body, "messages": begun}, max_tokens=4).content


def test_thinking_and_calls_of_messages(claude: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": ASK}]
    with claude.messages.stream(
        model="tiny",
        messages=messages,
        max_tokens=8,
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        thought = stream.get_final_message()
    assert [block.type for block in thought.content] == ["thinking"]
    tool: Any = {"name": "weather", "input_schema": UNIT}
    with claude.messages.stream(
        model="tiny",
        messages=messages,
        max_tokens=60,
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        called = stream.get_final_message()
    call = called.content[-1]
    assert call.type == "tool_use" and call.input["unit"] in ("C", "F")
    assert called.stop_reason == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
    history = [*messages, called.to_param(), {"role": "user", "content": [result]}]
    assert claude.messages.create(model="tiny", messages=history, max_tokens=4, tools=[tool])


def test_an_agent_calls_its_tool_and_answers(server: RemoteServer) -> None:
    import agents

    asked: list[str] = []

    @agents.function_tool
    def weather(unit: Literal["C", "F"]) -> str:
        """The weather now."""
        asked.append(unit)
        return "7"

    async def run() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0)
        agents.set_tracing_disabled(True)
        agents.set_default_openai_client(client, use_for_tracing=False)
        settings = agents.ModelSettings(
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=60,
            temperature=0,
            extra_body={"stop": ["\n"]},
        )
        agent = agents.Agent(
            name="a", instructions="Help.", model="tiny", tools=[weather], model_settings=settings
        )
        whole = await agents.Runner.run(agent, ASK, max_turns=3)
        streamed = agents.Runner.run_streamed(agent, ASK, max_turns=3)
        async for _ in streamed.stream_events():
            pass
        return [whole.final_output, streamed.final_output]

    outputs = asyncio.run(run())
    assert len(asked) == 2 and asked[0] in ("C", "F")
    assert isinstance(outputs[0], str) and outputs[0] == outputs[1]
