# SPDX-License-Identifier: Apache-2.0
"""The prefix cache of a hybrid over HTTP: conversations, preambles, marks, pins, receipts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from remote_server import RemoteServer

pytestmark = pytest.mark.e2e

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen3_5-code"
SYSTEM = {
    "role": "system",
    "content": "Write Python only. Every function has a docstring and type annotations. " * 3,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RemoteServer]:
    flags = ("--max-model-len", "1024", "--max-num-seqs", "8")
    with RemoteServer(MODEL, *flags, env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


def chat(server: RemoteServer, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def complete(server: RemoteServer, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, **fields}
    reply = requests.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def cached(reply: dict[str, Any]) -> int:
    tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_every_turn_continues_from_the_one_before(server: RemoteServer) -> None:
    """Token ids make the history exact: the text of an answer may tokenise differently."""
    tokens = list(range(300, 340))
    computed = 0
    for turn in range(4):
        reply = complete(server, tokens, return_token_ids=True, max_tokens=9, ignore_eos=True)
        assert cached(reply) >= computed - 1, turn
        computed = len(tokens) + 9 - 1
        tokens += reply["choices"][0]["token_ids"] + list(range(400 + turn, 410 + turn))


def test_a_shared_system_prompt_hits_from_the_second_request_on(server: RemoteServer) -> None:
    first = chat(server, [SYSTEM, {"role": "user", "content": "Sort a list."}])
    assert cached(first) == 0
    for question in ("Read a file.", "Print it"):
        reply = chat(
            server, [SYSTEM, {"role": "user", "content": question}], return_cache_report=True
        )
        preamble = cached(reply)
        assert preamble > 40
        assert reply["usage"]["prompt_tokens"] - preamble < 25
        report = reply["cache_report"]
        assert report["cached_tokens"] == preamble
        assert {group["kind"] for group in report["groups"]} == {"FullAttentionSpec", "MambaSpec"}


def test_raw_completions_learn_the_divergence(server: RemoteServer) -> None:
    shared = list(range(500, 590))
    found = [cached(complete(server, shared + [600 + i] * 9)) for i in range(3)]
    assert found == [0, 0, 64]


def test_marked_messages_can_be_continued(server: RemoteServer) -> None:
    history = [
        {"role": "user", "content": "def area(radius):"},
        {"role": "assistant", "content": "return 3.14 * radius ** 2"},
    ]
    question = {"role": "user", "content": "And the circumference?"}
    first = chat(server, [*history, question], cache_checkpoints="messages")
    other = {"role": "user", "content": "A sphere now."}
    reply = chat(server, [*history, other])
    assert first["usage"]["prompt_tokens"] > cached(reply) > 20


def test_streams_carry_the_receipt_at_the_end(server: RemoteServer) -> None:
    prompt = list(range(700, 730))
    complete(server, prompt)
    body = {"prompt": prompt, "max_tokens": 3, "stream": True, "return_cache_report": True}
    with requests.post(f"{server.url}/v1/completions", json=body, timeout=60, stream=True) as reply:
        chunks = [line for line in reply.iter_lines() if b"cache_report" in line]
    assert len(chunks) == 1
    assert b'"cached_tokens":29' in chunks[0].replace(b" ", b"")


def test_reset_forgets_and_pins_go_with_it(server: RemoteServer) -> None:
    prompt = list(range(800, 830))
    complete(server, prompt, cache_pin_seconds=60)
    assert cached(complete(server, prompt)) == 29
    reply = requests.post(f"{server.url}/reset_prefix_cache", timeout=30)
    assert reply.status_code == 200, reply.text
    assert cached(complete(server, prompt)) == 0


@pytest.mark.parametrize(
    "fields, parameter",
    [
        ({"cache_checkpoints": [0]}, "cache_checkpoints"),
        ({"cache_checkpoints": "messages"}, "cache_checkpoints"),
        ({"cache_pin_seconds": -1}, "cache_pin_seconds"),
        ({"cache_pin_seconds": 1e9}, "cache_pin_seconds"),
    ],
)
def test_bad_fields(server: RemoteServer, fields: dict[str, Any], parameter: str) -> None:
    body = {"prompt": [1, 2], **fields}
    reply = requests.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == parameter


def test_metrics_name_the_reasons(server: RemoteServer) -> None:
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    assert "vllm:prefix_cache_group_hits_total" in text
    assert 'reason="no_checkpoint"' in text
