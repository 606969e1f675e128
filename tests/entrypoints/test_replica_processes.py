# SPDX-License-Identifier: Apache-2.0
"""Several API processes in front of several replicas: real processes and TCP, a model of no
cost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.entrypoints.test_api_processes import (
    COMPLETIONS,
    STEP_MS,
    Server,
    Stream,
    _abort,
    wait_until,
)

pytestmark = pytest.mark.slow

PROMPT = "a prompt that fills some blocks of state, " * 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLICAS", "2")
        running = Server(log, "-asc", "2").ready()
    try:
        wait_until(lambda: len(running.serving()) == 2)
        yield running
        if running.popen.poll() is None:
            assert running.stop() == 0, log.read_text()
    finally:
        running.popen.kill()


def by_engine(server: Server, name: str) -> dict[str, float]:
    """A metric's sum for each replica."""
    found: dict[str, float] = {}
    for labels, value in re.findall(
        rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", server.get("/metrics").text, re.M
    ):
        (engine,) = re.findall(r'engine="(\d+)"', labels)
        found[engine] = found.get(engine, 0.0) + float(value)
    return found


def complete(server: Server, rank: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if rank is None else {"X-data-parallel-rank": rank}
    body = {"max_tokens": 3, "ignore_eos": True, **body}
    with server.client() as client:
        return client.post(COMPLETIONS, json=body, headers=headers)


def rank_of(reply: httpx.Response) -> int:
    rank: int = reply.json()["cache_report"]["data_parallel_rank"]
    return rank


def test_all_processes_use_all_replicas_and_count_together(server: Server) -> None:
    # All have been placed before any has its first token.
    server.post("/collective_rpc", method="pace", args=[0.5])
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda i: complete(server, prompt=f"{i} is a number"), range(16)))
    server.post("/collective_rpc", method="pace", args=[STEP_MS / 1000])
    assert {reply.status_code for reply in replies} == {200}
    for name in ("vllm:request_success_total", "vllm:replica_requests_total"):
        found = by_engine(server, name)
        assert set(found) == {"0", "1"} and sum(found.values()) == 16 and min(found.values()) >= 4
    assert by_engine(server, "vllm:generation_tokens_total").keys() == {"0", "1"}
    assert by_engine(server, "vllm:cache_config_info") == {"0": 1.0, "1": 1.0}
    wait_until(lambda: by_engine(server, "vllm:replica_waiting_tokens") == {"0": 0.0, "1": 0.0})
    decisions = {one["what"]: one["chosen"] for one in server.get("/decisions").json()}
    assert decisions["replicas"] == "2"


def test_a_prompt_goes_where_it_is_cached_whichever_process_takes_it(server: Server) -> None:
    for rank in (1, 0):
        prompt = f"{rank} {PROMPT}"
        replies = [
            complete(server, str(rank), prompt=prompt, return_cache_report=True),
            *(complete(server, prompt=prompt, return_cache_report=True) for _ in range(5)),
        ]
        assert [rank_of(reply) for reply in replies] == [rank] * 6
        cached = [r.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for r in replies]
        assert all(cached[1:])
    for wrong in ("2", "-1", "one"):
        reply = complete(server, wrong, prompt="a")
        assert reply.status_code == 400 and "rank" in reply.json()["error"]["message"]


def test_all_replicas_sleep_and_answer(server: Server) -> None:
    before = server.post("/collective_rpc", method="note").json()["results"]
    assert len({one["pid"] for one in before}) == 2
    assert server.post("/reset_prefix_cache").status_code == 200
    with server.client() as client:
        assert client.post("/sleep", params={"level": 1}).status_code == 200
        states = by_engine(server, "vllm:engine_sleep_state")
        assert states == {"0": 1.0, "1": 1.0}
        assert server.get("/metrics").text.count('sleep_state="weights_offloaded"} 1.0') == 2
        assert complete(server, prompt="a").status_code == 503
        assert client.post("/wake_up").status_code == 200
    for rank in "01":
        assert complete(server, rank, prompt="a").status_code == 200


def test_what_a_killed_process_waited_for_is_not_counted_any_more(server: Server) -> None:
    streams = [Stream(server, 1000) for _ in range(6)]
    wait_until(lambda: all(stream.ids for stream in streams))
    assert min(by_engine(server, "vllm:replica_waiting_tokens").values()) > 0
    os.kill(server.serving()[0], signal.SIGKILL)
    wait_until(lambda: not _abort(server, streams))
    wait_until(lambda: len(server.serving()) == 2)
    wait_until(lambda: by_engine(server, "vllm:num_requests_running") == {"0": 0.0, "1": 0.0})
    for rank in "01":
        assert complete(server, rank, prompt="b").status_code == 200
    wait_until(lambda: by_engine(server, "vllm:replica_waiting_tokens") == {"0": 0.0, "1": 0.0})


def test_a_killed_replica_ends_the_server(server: Server) -> None:
    streams = [Stream(server, 2000) for _ in range(4)]
    wait_until(lambda: all(stream.ids for stream in streams))
    pids = [one["pid"] for one in server.post("/collective_rpc", method="note").json()["results"]]
    os.kill(pids[1], signal.SIGKILL)
    assert server.popen.wait(120) == 1, server.log.read_text()
    for stream in streams:
        stream.join(60)
        assert '"error"' in stream.text or stream.error is not None
    assert "replica 1: its process ended (exit code -9)" in server.log.read_text()
    wait_until(lambda: not os.path.exists(f"/proc/{pids[0]}"))
