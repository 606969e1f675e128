# SPDX-License-Identifier: Apache-2.0
"""What `vllm bench serve` sends, and what it makes of the bytes and times of a reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks.scripted_server import events, text, usage
from vllm.benchmarks.client import DIALECTS, Exchange, RequestOptions, encode_request
from vllm.benchmarks.connection import Endpoint, Reply
from vllm.benchmarks.outcome import Outcome, Sample
from vllm.exceptions import VLLMValidationError

SAMPLE = Sample("hello", 5, 7)
DONE = b"data: [DONE]\n\n"


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def measure(
    *reads: tuple[float, bytes],
    backend: str = "openai",
    status: int = 200,
    error: str | None = None,
) -> Outcome:
    """A request sent at 1 s, half a second after the start, of which these bytes came."""
    reply = Reply()
    reply.status = status
    for now, data in reads:
        reply.body += data
        reply.note_read(now)
    return Exchange(1.0, 9.0, reply, error).measure(DIALECTS[backend], 0.5, 5)


def test_a_completion_is_timed_read_by_read() -> None:
    outcome = measure(
        (2.0, events(text("a"))),
        (3.0, events(text(""))),
        (4.5, events(text("bc")) + events(text("", "length"))),
        (6.0, events(usage(6, 9)) + DONE),
    )
    # The closing chunk stands for no token, nor does the usage.
    assert outcome == Outcome(
        start=0.5,
        prompt_len=6,
        ttft=1.0,
        itl=[1.0, 1.5],
        latency=3.5,
        output_len=9,
        text="abc",
    )
    assert outcome.tpot == 2.5 / 8


def test_events_of_one_read_came_at_once() -> None:
    outcome = measure((2.0, events(text("a"), text("b"))), (3.0, events(text("c"))))
    assert outcome.itl == [0.0, 1.0] and outcome.ttft == 1.0 and outcome.text == "abc"
    assert outcome.output_len == 3 and outcome.prompt_len == 5


def test_the_last_token_may_come_with_the_finish_reason() -> None:
    outcome = measure((2.0, events(text("a"))), (4.0, events(text("b", "stop"))))
    assert outcome.text == "ab" and outcome.latency == 3.0 and outcome.output_len == 2


def test_the_server_counts_its_tokens() -> None:
    """Several tokens in one event, in the first one too; text with what JSON escapes."""
    told = 'one "two"\n\\ three \u00e9'
    outcome = measure((2.0, events(text(told))), (3.0, events(text("!"), usage(4, 7))))
    assert outcome.text == told + "!" and outcome.output_len == 7 and outcome.itl == [1.0]


def test_usage_in_every_event_ends_with_the_truth() -> None:
    pieces = [{**usage(4, count), **text("x")} for count in (3, 5)]
    outcome = measure((2.0, events(*pieces, usage(4, 6))))
    assert outcome.output_len == 6 and outcome.text == "xx"


def test_the_chat_chunks_that_stand_for_tokens() -> None:
    outcome = measure(
        (2.0, events(delta(role="assistant", content=""))),
        (3.0, events(delta(reasoning="hm"))),
        (4.0, events(delta(content=""))),
        (5.0, events(delta(content="yes"))),
        (6.0, events(delta(tool_calls=[{}]))),
        (7.0, events(delta("stop"))),
        backend="openai-chat",
    )
    assert outcome.text == "hmyes" and outcome.itl == [1.0, 1.0, 1.0] and outcome.ttft == 2.0
    assert outcome.latency == 5.0


def encoded(backend: str, **options: Any) -> tuple[list[str], dict[str, Any]]:
    endpoint = Endpoint("http://s:81/x?y=1")
    settings = RequestOptions("m", "http://s:81/x?y=1", **options)
    head, _, body = encode_request(endpoint, DIALECTS[backend], settings, SAMPLE, 3).partition(
        b"\r\n\r\n"
    )
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
    return head.decode().split("\r\n"), json.loads(body)


def test_a_request_as_it_goes_over_the_wire() -> None:
    head, body = encoded(
        "openai",
        extra={"temperature": 0.0, "ignore_eos": True},
        headers={"Authorization": "Bearer k", "user-agent": "me"},
        request_id_prefix="run-",
    )
    assert body == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert head[0] == "POST /x?y=1 HTTP/1.1" and "Host: s:81" in head
    assert {"X-Request-Id: run-3", "Authorization: Bearer k", "user-agent: me"} <= set(head)
    assert not any(line.startswith("User-Agent") for line in head)
    _, body = encoded("openai-chat")
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["max_completion_tokens"] == 7 and "prompt" not in body


@pytest.mark.parametrize("url", ["ftp://s/x", "s:80/x", "http:///x", "http://me:pw@s/x"])
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(VLLMValidationError):
        Endpoint(url)


@pytest.mark.parametrize(
    ("reply", "status", "words"),
    [
        (b"slow down", 429, "ServerError: status 429: slow down"),
        (b"", 307, "status 307"),
        (events(text("a"), {"error": {"message": "engine died"}}), 200, "engine died"),
        (DONE, 200, "ended without a token"),
        (b"data: {\n\n", 200, "DecodeError"),
        (b"data: [1]\n\n", 200, "no object"),
    ],
)
def test_what_the_server_did_wrong(reply: bytes, status: int, words: str) -> None:
    outcome = measure((2.0, reply), status=status)
    # Until it was over; of what it did not say, nothing.
    assert outcome.error is not None and words in outcome.error and outcome.latency == 8.0


def test_a_reply_that_broke_off_keeps_what_came() -> None:
    outcome = measure((2.0, events(text("a"))), (3.0, events(text("b"))), error="gone")
    assert outcome.error == "gone" and outcome.ttft == 1.0 and outcome.itl == [1.0]
    assert outcome.latency == 8.0
