# SPDX-License-Identifier: Apache-2.0
"""Events framed from templates are, byte for byte, the encoded chunks."""

from __future__ import annotations

import json
from functools import partial

import httpx
import pytest

from tests.entrypoints.conftest import MakeClient
from vllm.entrypoints.openai.protocol.completion import CompletionChoice
from vllm.entrypoints.openai.streaming import DONE, TextEvents, event

TEXTS = [
    "",
    "plain",
    'quote " backslash \\ slash / tab \t newline \n return \r bell \x07 nul \0 delete \x7f',
    "Grüße 漢字 🎉 \x85 \u2028 \u2029 \ufffd",
    '\0text","text":"\\u0000text',
    "\ndata: [DONE]\n\n",
]


def payload(name: str, text: str) -> dict[str, object]:
    choice = {"index": 0, "text": text, "logprobs": None, "stop_reason": None}
    return {"model": name, "choices": [choice]}


@pytest.mark.parametrize("name", ["m", "\0text", 'a "quoted" name'])
@pytest.mark.parametrize("text", TEXTS)
def test_a_framed_text_is_the_encoded_payload(name: str, text: str) -> None:
    make = partial(payload, name)
    framed = TextEvents(make).event(text)
    assert framed == event(make(text))
    # One event in one line, whatever the text holds, to readers that split at Unicode's line ends.
    assert framed.endswith(b"\n\n") and len(framed.decode().splitlines()) == 2
    (choice,) = json.loads(framed.removeprefix(b"data: "))["choices"]
    assert choice["text"] == text


async def blocks(client: httpx.AsyncClient, **body: object) -> list[bytes]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    reply = await client.post(path, json={"stream": True, **body})
    assert reply.status_code == 200, reply.text
    *events, done, end = reply.content.split(b"\n\n")
    assert done + b"\n\n" == DONE and end == b""
    return [one + b"\n\n" for one in events]


@pytest.mark.asyncio
async def test_completion_frames(client: httpx.AsyncClient) -> None:
    """Canonical JSON, one event per token, the choice as its protocol object dumps it."""
    got = await blocks(client, prompt=["hi", "you"], n=2, max_tokens=9)
    assert len(got) == 4 * 9
    for one in got:
        chunk = json.loads(one.removeprefix(b"data: "))
        assert one == event(chunk)
        (choice,) = chunk["choices"]
        dumped = CompletionChoice(**choice).model_dump_json(
            exclude={"token_ids", "prompt_token_ids", "prompt_logprobs"}
        )
        assert dumped.encode() in one


@pytest.mark.asyncio
@pytest.mark.parametrize("reasoning", [None, "deepseek_r1"])
async def test_chat_frames(make_client: MakeClient, reasoning: str | None) -> None:
    client = make_client(reasoning_parser=reasoning) if reasoning else make_client()
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 9}
    got = await blocks(client, **body)
    usage = await blocks(
        client,
        **body,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    plain = []
    for one in got:
        chunk = json.loads(one.removeprefix(b"data: "))
        assert one == event(chunk)
        plain.append(chunk["choices"])
    # Chunks with usage are built as objects, and hold the same choices.
    built = [json.loads(one.removeprefix(b"data: "))["choices"] for one in usage]
    assert plain == built[:-1]
    key = "reasoning" if reasoning else "content"
    text = "".join(c["delta"].get(key, "") for (c,) in plain if c["index"] == 0)
    assert text == "Grüße f"
