# SPDX-License-Identifier: Apache-2.0
"""`vllm run-batch` around a fake engine."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.fake_engine import FakeAsyncLLM
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.entrypoints.openai.run_batch import BatchCounts, run_batch
from vllm.v1.engine.async_llm import AsyncLLM

Line = dict[str, Any]


def completion(custom_id: str, **body: Any) -> Line:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 5, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def chat(custom_id: str, **body: Any) -> Line:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


async def answers(
    engine: FakeAsyncLLM, *lines: Line | str, max_in_flight: int = 4
) -> tuple[list[dict[str, Any]], BatchCounts]:
    encoded = [(line if isinstance(line, str) else json.dumps(line)).encode() for line in lines]
    app = build_app(engine, FrontEndArgs())  # type: ignore[arg-type]
    output = io.StringIO()
    counts = await run_batch(app, encoded, output, max_in_flight, len(encoded))
    return [json.loads(line) for line in output.getvalue().splitlines()], counts


@pytest.mark.asyncio
async def test_answers_are_in_order_and_complete(engine: FakeAsyncLLM) -> None:
    lines = [completion(f"c{i}", max_tokens=9 - i % 9) for i in range(20)] + [chat("chat")]
    found, counts = await answers(engine, *lines)
    assert [a["custom_id"] for a in found] == [*(f"c{i}" for i in range(20)), "chat"]
    assert counts == BatchCounts(21, 0) and all(a["error"] is None for a in found)
    assert {a["response"]["status_code"] for a in found} == {200}
    assert found[0]["response"]["body"]["choices"][0]["text"] == "Grüße f"
    assert found[-1]["response"]["body"]["choices"][0]["message"]["content"].startswith("Gr")
    assert len({a["id"] for a in found} | {a["response"]["request_id"] for a in found}) == 42


@pytest.mark.asyncio
async def test_responses(engine: FakeAsyncLLM) -> None:
    def line(custom_id: str, **body: Any) -> Line:
        return {"custom_id": custom_id, "url": "/v1/responses", "body": {"input": "hi", **body}}

    found, counts = await answers(engine, line("a", max_output_tokens=5), line("b", store=True))
    assert counts == BatchCounts(2, 1)
    assert found[0]["response"]["body"]["output"][0]["content"][0]["text"].startswith("Gr")
    assert found[1]["error"]["param"] == "store"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("{", 400, "not valid JSON"),
        ("[]", 400, "expected a JSON object"),
        ({"url": "/v1/completions", "body": {}}, 400, "custom_id"),
        ({**completion("x"), "method": "GET"}, 400, "method: expected POST"),
        ({**completion("x"), "url": "/v1/embeddings"}, 400, "/v1/chat/completions"),
        ({**completion("x"), "body": 3}, 400, "body: expected a JSON object"),
        (completion("x", stream=True), 400, "not streamed"),
        (completion("x", temperature=-1), 400, "temperature"),
        (completion("x", model="other"), 404, "`other` does not exist"),
        (chat("x", messages=[]), 400, "messages"),
    ],
)
async def test_a_bad_line_stops_nothing(
    engine: FakeAsyncLLM, line: Line | str, status: int, words: str
) -> None:
    found, counts = await answers(engine, completion("a"), line, completion("b"))
    assert counts == BatchCounts(3, 1)
    good, bad, last = found
    assert good["error"] is None and last["error"] is None
    assert bad["response"]["status_code"] == status and words in bad["error"]["message"]
    assert bad["response"]["body"] == {"error": bad["error"]}
    known = isinstance(line, dict) and "custom_id" in line
    assert bad["custom_id"] == ("x" if known else None)


@pytest.mark.asyncio
async def test_a_request_that_the_engine_fails_is_an_error_line(engine: FakeAsyncLLM) -> None:
    engine.fail_after = 0
    found, counts = await answers(engine, completion("a"), chat("b"))
    assert [a["response"]["status_code"] for a in found] == [500, 500] and counts.errors == 2


@pytest.mark.asyncio
async def test_requests_in_flight_are_bounded(engine: FakeAsyncLLM) -> None:
    most = 0
    record = engine._interfere

    async def watch(done: int) -> None:
        nonlocal most
        most = max(most, len(engine.running))
        await record(done)

    engine._interfere = watch  # type: ignore[method-assign]
    await answers(engine, *(completion(str(i)) for i in range(30)), max_in_flight=3)
    assert 2 <= most <= 3


@pytest.fixture
def fake_start(monkeypatch: pytest.MonkeyPatch, engine: FakeAsyncLLM) -> FakeAsyncLLM:
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda args: engine)
    return engine


def test_the_command(
    fake_start: FakeAsyncLLM,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever key servers started from here ask for, and with the mark of a file from Windows."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = json.dumps(completion("a")) + "\n\n{\n" + json.dumps(chat("b"))
    source.write_text(lines, encoding="utf-8-sig")
    flags = ["--model", "m", "--response-role", "robot"]
    assert main(["run-batch", "-i", str(source), "-o", str(target), *flags]) == 0
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [a["custom_id"] for a in found] == ["a", None, "b"] and fake_start.shut_down
    assert found[2]["response"]["body"]["choices"][0]["message"]["role"] == "robot"
    assert "3 requests, 1 of them with an error" in capsys.readouterr().out


def test_a_dead_engine_is_a_failure(fake_start: FakeAsyncLLM, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(completion("a")))
    fake_start.dead = True
    assert main(["run-batch", "-i", str(source), "-o", str(target), "--model", "m"]) == 1
    assert json.loads(target.read_text())["response"]["status_code"] == 500
    assert fake_start.shut_down


@pytest.mark.parametrize("output", ["in.jsonl", "no/such/folder/out.jsonl"])
def test_bad_files(fake_start: FakeAsyncLLM, tmp_path: Path, output: str) -> None:
    source = tmp_path / "in.jsonl"
    assert main(["run-batch", "-i", str(source), "-o", "x", "--model", "m"]) == 1
    source.write_text(json.dumps(completion("a")))
    flags = ["-i", str(source), "-o", str(tmp_path / output), "--model", "m"]
    assert main(["run-batch", *flags]) == 1
    assert json.loads(source.read_text())["custom_id"] == "a" and not fake_start.calls
