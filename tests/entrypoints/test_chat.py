# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` without streaming, and its render route."""

import httpx
import pytest

from tests.entrypoints.conftest import MakeClient
from tests.entrypoints.fake_engine import FakeAsyncLLM, byte_ids, byte_tokenizer

pytestmark = pytest.mark.asyncio

HI = [{"role": "user", "content": "hi"}]


async def chat(client: httpx.AsyncClient, status: int = 200, **body: object) -> dict:
    reply = await client.post("/v1/chat/completions", json={"messages": HI, **body})
    assert reply.status_code == status, reply.text
    return reply.json()


def prompt_text(engine: FakeAsyncLLM) -> str:
    return engine.calls[-1].prompt["prompt"]


async def test_reply_has_every_key_but_empty_tool_calls(client: httpx.AsyncClient) -> None:
    reply = await chat(client, max_tokens=2)
    assert reply["id"].startswith("chatcmpl-") and reply["object"] == "chat.completion"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Gr",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    for key in ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params", "service_tier"):
        assert reply[key] is None
    assert reply["usage"]["completion_tokens"] == 2


async def test_template_and_engine_id(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    await chat(client, max_tokens=1, request_id="me")
    assert prompt_text(engine) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.calls[0].request_id == "chatcmpl-me"
    ids = engine.calls[0].prompt["prompt_token_ids"]
    assert ids[0] == byte_tokenizer().convert_tokens_to_ids("<|im_start|>")


async def test_closed_turns(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    messages = [*HI, {"role": "assistant", "content": "yo"}]
    await chat(client, messages=messages, add_generation_prompt=False, max_tokens=1)
    assert prompt_text(engine).endswith("<|im_start|>assistant\nyo<|im_end|>\n")


async def test_continue_final_message(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    messages = [*HI, {"role": "assistant", "content": "yo"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    reply = await chat(client, **body, max_tokens=2, echo=True)
    assert prompt_text(engine).endswith("<|im_start|>assistant\nyo")
    assert reply["choices"][0]["message"]["content"] == "yoGr"
    assert reply["choices"][0]["message"]["role"] == "assistant"


async def test_max_tokens_names_and_default(
    client: httpx.AsyncClient, engine: FakeAsyncLLM
) -> None:
    await chat(client, max_tokens=3)
    await chat(client, max_tokens=3, max_completion_tokens=4)
    await chat(client)
    prompt_length = len(engine.calls[0].prompt["prompt_token_ids"])
    assert [c.params.max_tokens for c in engine.calls] == [3, 4, 512 - prompt_length]


async def test_logprobs(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    reply = await chat(client, max_tokens=1, logprobs=True, top_logprobs=2)
    (entry,) = reply["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "G" and entry["bytes"] == [71] and entry["logprob"] == -0.5
    assert [top["token"] for top in entry["top_logprobs"]] == ["G", "H"]
    assert engine.calls[0].params.logprobs == 2
    reply = await chat(client, max_tokens=1, logprobs=True)
    assert reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    reply = await chat(client, max_tokens=4, logprobs=True)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [len(entry["bytes"]) for entry in entries] == [1] * 4
    assert bytes(sum((entry["bytes"] for entry in entries), [])).decode() == "Grü"
    reply = await chat(client, max_tokens=4, logprobs=True, return_tokens_as_token_ids=True)
    by_id = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in by_id] == [f"token_id:{i}" for i in byte_ids("Grü")[:4]]
    assert [entry["bytes"] for entry in by_id] == [entry["bytes"] for entry in entries]


async def test_token_ids_at_top_level(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    reply = await chat(client, max_tokens=2, return_token_ids=True, kv_transfer_params={"k": 1})
    assert reply["prompt_token_ids"] == engine.calls[0].prompt["prompt_token_ids"]
    assert len(reply["choices"][0]["token_ids"]) == 2
    assert "prompt_token_ids" not in reply["choices"][0]
    assert reply["kv_transfer_params"]["got"] == {"k": 1}


async def test_content_parts_and_roles(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await chat(client, messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert "user\none\ntwo<|im_end|>" in prompt_text(engine)


async def test_template_kwargs(make_client: MakeClient, engine: FakeAsyncLLM) -> None:
    client = make_client(default_chat_template_kwargs={"extra": "[server]"})
    await chat(client, max_tokens=1)
    assert "[server]" in prompt_text(engine)
    await chat(client, max_tokens=1, chat_template_kwargs={"extra": "[request]"})
    assert "[request]" in prompt_text(engine) and "[server]" not in prompt_text(engine)


async def test_request_template_needs_trust(
    client: httpx.AsyncClient, make_client: MakeClient, engine: FakeAsyncLLM
) -> None:
    reply = await chat(client, 400, chat_template="{{ 1 + 1 }}")
    assert reply["error"]["param"] == "chat_template"
    await chat(make_client(trust_request_chat_template=True), chat_template="{{ 1 + 1 }}!")
    assert prompt_text(engine) == "2!"


async def test_server_template(make_client: MakeClient, engine: FakeAsyncLLM) -> None:
    await chat(make_client(chat_template="{{ messages[0].content }}", response_role="bot"))
    assert prompt_text(engine) == "hi"
    reply = await chat(make_client(response_role="bot"), max_tokens=1)
    assert reply["choices"][0]["message"]["role"] == "bot"


async def test_tools_are_shown_only(make_client: MakeClient, engine: FakeAsyncLLM) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    client = make_client()
    reply = await chat(client, 400, tools=tools)
    assert reply["error"]["param"] == "tools" and "tool_choice" in reply["error"]["message"]
    await chat(client, tools=tools, tool_choice="none", max_tokens=1)
    assert "[1 tools]" in prompt_text(engine)
    hiding = make_client(exclude_tools_when_tool_choice_none=True)
    await chat(hiding, tools=tools, tool_choice="none", max_tokens=1)
    assert "tools]" not in prompt_text(engine)


async def test_no_template(make_client: MakeClient, engine: FakeAsyncLLM) -> None:
    engine.tokenizer = byte_tokenizer(chat_template=None)
    reply = await chat(make_client(), 400)
    assert "--chat-template" in reply["error"]["message"]


async def test_template_error_is_the_clients(make_client: MakeClient) -> None:
    client = make_client(chat_template="{{ raise_exception('roles must alternate') }}")
    reply = await chat(client, 400)
    assert "roles must alternate" in reply["error"]["message"]


async def test_render(client: httpx.AsyncClient, engine: FakeAsyncLLM) -> None:
    body = {
        "messages": HI,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "add_generation_prompt": False,
        "kv_transfer_params": {"a": 1},
        "request_id": "me",
    }
    reply = (await client.post("/v1/chat/completions/render", json=body)).json()
    assert set(reply) == {
        "request_id",
        "token_ids",
        "features",
        "sampling_params",
        "model",
        "stream",
        "stream_options",
        "cache_salt",
        "priority",
        "kv_transfer_params",
    }
    text = byte_tokenizer().decode(reply["token_ids"])
    assert text == "<|im_start|>user\nhi<|im_end|>\n[1 tools]"
    assert reply["request_id"] == "chatcmpl-me" and reply["kv_transfer_params"] == {"a": 1}
    assert not engine.calls
