# SPDX-License-Identifier: Apache-2.0
"""A load shared among processes is the load that was asked for, and measures what happened."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.scripted_server import END, HEAD, ScriptedServer, chunk, events, text, usage
from vllm import decisions
from vllm.benchmarks import load as load_module
from vllm.benchmarks.arrivals import Load, arrival_times
from vllm.benchmarks.client import DIALECTS, RequestOptions
from vllm.benchmarks.connection import ConnectionPool, Endpoint, Reply
from vllm.benchmarks.load import ShareSender, wait_until
from vllm.benchmarks.metrics import summarize
from vllm.benchmarks.outcome import Sample
from vllm.benchmarks.processes import (
    LoadPlan,
    LoadResult,
    choose_num_processes,
    decide_num_processes,
    partition,
    run_load,
)
from vllm.entrypoints.cli.types import CommandError

pytestmark = pytest.mark.slow

#: how far two processes of a busy machine may be apart in seeing the same thing
SLACK_S = 0.15
GAP_S = 0.4
_ATTEMPTS = 8

QUICK = [(0.0, HEAD + chunk(events(text("a"), usage(1, 1))) + END)]
SLOW = [(0.0, HEAD), (0.2, chunk(events(text("a")))), (0.0, END)]


def plan(
    url: str,
    prompts: list[str],
    times_s: Any = None,
    max_concurrency: int | None = None,
    output_len: int = 4,
) -> LoadPlan:
    samples = [Sample(prompt, 1, output_len) for prompt in prompts]
    times = np.zeros(len(samples)) if times_s is None else times_s
    return LoadPlan("openai", RequestOptions("m", url + "/x"), samples, times, max_concurrency)


def load(*args: Any, num_processes: int = 2, **fields: Any) -> LoadResult:
    return run_load(plan(*args, **fields), num_processes, show_progress=False)


# ---- partition ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
@pytest.mark.parametrize("max_concurrency", [None, 7, 8, 20])
@pytest.mark.parametrize("num_requests", [7, 40, 101])
def test_every_request_has_one_process_and_keeps_its_time(
    num_processes: int, max_concurrency: int | None, num_requests: int
) -> None:
    times = arrival_times(Load(10.0), num_requests, 0)
    whole = plan("http://s", [str(i) for i in range(num_requests)], times, max_concurrency)
    shares = partition(whole, num_processes)
    dealt = {
        index: (sample.prompt, time_s)
        for share in shares
        for index, sample, time_s in zip(share.indices, share.samples, share.times_s, strict=True)
    }
    assert dealt == {i: (str(i), float(times[i])) for i in range(num_requests)}
    assert sum(len(share.indices) for share in shares) == num_requests
    assert all(list(share.indices) == sorted(share.indices) for share in shares)
    if max_concurrency is None:
        assert {share.max_concurrency for share in shares} == {None}
        counts = [len(share.indices) for share in shares]
        assert max(counts) - min(counts) <= 1
    else:
        slots = [share.max_concurrency or 0 for share in shares]
        assert sum(slots) == max_concurrency and max(slots) - min(slots) <= 1
        # A process with more slots gets as many more requests.
        per_slot = num_requests / max_concurrency
        for share, number in zip(shares, slots, strict=True):
            assert abs(len(share.indices) - per_slot * number) <= number


# ---- how many ----------------------------------------------------------------------------------

INF = float("inf")


@pytest.mark.parametrize(
    ("num_requests", "max_concurrency", "rate", "output_len", "num_cores", "expected"),
    [
        (1, None, INF, 128, 16, 1),
        (64, None, INF, 128, 16, 1),
        (256, None, INF, 256, 16, 4),
        (1000, 65, INF, 256, 16, 2),
        (1024, None, INF, 256, 16, 8),
        (1024, None, INF, 256, 2, 1),
        (1024, None, INF, 256, 1, 1),
        (1000, None, 10.0, 100, 16, 1),
        (1000, None, 300.0, 100, 16, 3),
        (100, 64, 3000.0, 100, 16, 1),
    ],
)
def test_the_number_of_processes_a_load_needs(
    num_requests: int,
    max_concurrency: int | None,
    rate: float,
    output_len: float,
    num_cores: int,
    expected: int,
) -> None:
    number, why = choose_num_processes(num_requests, max_concurrency, rate, output_len, num_cores)
    assert number == expected and why


def test_the_choice_is_recorded_and_what_is_asked_for_is_used() -> None:
    whole = plan("http://s", ["a"] * 5, max_concurrency=3)
    decisions.clear()
    assert decide_num_processes(None, whole, INF) == 1
    assert [(d.what, d.chosen) for d in decisions.decisions()][-1] == ("client processes", "1")
    assert decide_num_processes(3, whole, INF) == 3
    with pytest.raises(CommandError, match="only 3 requests in flight"):
        decide_num_processes(4, whole, INF)


# ---- what is measured --------------------------------------------------------------------------


def least(measure: Callable[[], float]) -> float:
    """Seconds that what is measured is off by, at best: it is when a process gets no processor for
    a while, and always when it is measured wrongly."""
    found = math.inf
    for _ in range(_ATTEMPTS):
        found = min(found, measure())
        if found < SLACK_S:
            break
    return found


def off_by(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference."""
    assert len(found) == len(expected)
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def test_times_are_those_at_which_the_server_sent() -> None:
    """The figures against those of the server's own clock, for replies of every shape."""
    assert least(_measure_replies) < SLACK_S


def _measure_replies() -> float:
    one, two = chunk(events(text("a"))), chunk(events(text("b c")))
    end = chunk(events(text("", "length"), usage(2, 9))) + END
    scripts = {
        "one by one": [(0.0, HEAD), (GAP_S, one), (GAP_S, two), (GAP_S, end)],
        "two in a read": [(0.0, HEAD), (2 * GAP_S, one + two), (GAP_S, one), (0.0, end)],
        "in halves": [(0.0, HEAD + one[:9]), (GAP_S, one[9:] + two[:20]), (GAP_S, two[20:] + end)],
    }
    #: the write that completed each event with a token
    token_writes = {"one by one": [1, 2], "two in a read": [1, 1, 2], "in halves": [1, 2]}
    with ScriptedServer(scripts) as server:
        result = load(server.url, list(scripts), num_processes=3)
    visits = {name: v for v in server.visits for name in scripts if name.encode() in v.body}
    ended = max(visit.ended for visit in server.visits) - min(v.arrived for v in server.visits)
    found, expected = [result.duration_s], [ended]
    for name, outcome in zip(scripts, result.outcomes, strict=True):
        visit = visits[name]
        assert outcome.error is None
        writes = [visit.writes[i] for i in token_writes[name]]
        first, last = writes[0] - visit.arrived, writes[-1] - visit.arrived
        assert outcome.ttft >= first and outcome.latency >= last
        found += [outcome.ttft, outcome.latency, *outcome.itl]
        expected += [first, last, *np.diff(writes)]
        assert (outcome.prompt_len, outcome.output_len) == (2, 9)
        assert outcome.tpot == pytest.approx((outcome.latency - outcome.ttft) / 8)
    texts = [outcome.text for outcome in result.outcomes]
    assert texts == ["ab c", "ab ca", "ab c"]
    summary = summarize(result.outcomes, result.duration_s, [50, 100])
    ttfts = [outcome.ttft * 1e3 for outcome in result.outcomes]
    assert summary.latencies["ttft"].percentiles == pytest.approx(
        {50: np.median(ttfts), 100: max(ttfts)}
    )
    assert len(result.clients) == 3
    return off_by(found, expected)


@pytest.mark.parametrize("num_processes", [1, 3])
def test_requests_come_when_the_whole_load_has_them(num_processes: int) -> None:
    """The arrival process does not depend on the number of processes, nor does the order."""
    assert least(lambda: _measure_arrivals(num_processes)) < SLACK_S


def _measure_arrivals(num_processes: int) -> float:
    times = arrival_times(Load(60.0), 40, seed=3)
    prompts = [f"p{i:02}" for i in range(40)]
    with ScriptedServer({"": QUICK}) as server:
        result = load(server.url, prompts, times, num_processes=num_processes)
    seen = sorted((f"p{i:02}", v.arrived) for v in server.visits for i in range(40)
                  if f'"p{i:02}"'.encode() in v.body)  # fmt: skip
    assert [name for name, _ in seen] == prompts
    arrived = np.array([time for _, time in seen])
    lateness = (arrived - arrived[0]) - times
    starts = [outcome.start for outcome in result.outcomes]
    # A uvloop timer has a resolution of 1 ms: nobody is sent earlier than that allows.
    assert min(start - time for start, time in zip(starts, times, strict=True)) > -0.002
    return max(
        2 * float(np.abs(np.median(lateness))),
        float(np.abs(lateness).max()) / 2,
        off_by(starts, list(times)) / 2,
    )


@pytest.mark.parametrize("num_processes", [1, 2, 5])
def test_the_limit_of_concurrency_is_that_of_all_processes(num_processes: int) -> None:
    assert least(lambda: _measure_slots(num_processes)) < SLACK_S


def _measure_slots(num_processes: int) -> float:
    with ScriptedServer({"": SLOW}) as server:
        result = load(server.url, ["a"] * 15, max_concurrency=5, num_processes=num_processes)
    assert server.most_in_flight() <= 5
    assert summarize(result.outcomes, result.duration_s, []).max_concurrent_requests <= 5
    # Those who waited took the connections of those who were done.
    assert server.num_connections == 5 + num_processes
    ttfts = [outcome.ttft for outcome in result.outcomes]
    assert min(ttfts) > 0.1
    # Waiting for a slot is not part of a request's time; all slots are used at once.
    return (max(ttfts) - 0.2) / 2 if server.most_in_flight() == 5 else math.inf


@pytest.mark.parametrize("most_bytes", [0, 1 << 20])
def test_replies_are_read_at_once_when_many_bytes_are_kept(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(load_module, "_MAX_UNREAD_BYTES", most_bytes)
    script = [(0.0, HEAD + chunk(events(text("a"), text("b"), usage(3, 7))) + END)]
    read: list[Reply] = []
    events_of = Reply.events

    def counted(reply: Reply) -> Iterator[tuple[float, bytes]]:
        read.append(reply)
        return events_of(reply)

    monkeypatch.setattr(Reply, "events", counted)

    async def main(sender: ShareSender) -> list[int]:
        numbers: list[int] = []
        await sender.send(time.perf_counter(), lambda: numbers.append(len(read)))
        return numbers

    with ScriptedServer({"": script}) as server:
        whole = plan(server.url, ["a"] * 3)
        pool = ConnectionPool(Endpoint(whole.options.url))
        sender = ShareSender(pool, DIALECTS["openai"], whole.options, partition(whole, 1)[0])
        read_at_ends = asyncio.run(main(sender))
    assert read_at_ends == ([0, 0, 0] if most_bytes else [1, 2, 3])
    assert [(o.text, o.output_len) for o in sender.outcomes(0.0)] == [("ab", 7)] * 3
    assert len(read) == 3


def test_every_request_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer({"": QUICK}) as server:
        result = run_load(plan(server.url, ["a"] * 30), 3, show_progress=True)
    assert [outcome.error for outcome in result.outcomes] == [None] * 30
    assert "30/30" in capfd.readouterr().err


def test_servers_that_fail_are_outcomes() -> None:
    with ScriptedServer({"ok": QUICK[:1], "gone": [(0.0, None)]}) as server:
        result = load(server.url, ["ok", "gone", "ok", "gone"])
    errors = Counter(outcome.error is None for outcome in result.outcomes)
    assert errors == {True: 2, False: 2}
    assert result.outcomes[1].error == "ConnectionError: the server closed the connection"


def test_a_process_that_ends_early_ends_the_load(capfd: pytest.CaptureFixture[str]) -> None:
    whole = plan("http://127.0.0.1:1", ["a"] * 4)
    whole.options.extra["x"] = 1j  # has no JSON
    with pytest.raises(CommandError, match="client process ended early, with exit status 1"):
        run_load(whole, 2, show_progress=False)
    assert "TypeError" in capfd.readouterr().err


def test_a_timer_that_ends_early_starts_nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timers of uvloop count milliseconds."""
    sleep = asyncio.sleep
    monkeypatch.setattr(load_module.asyncio, "sleep", lambda delay: sleep(delay * 0.5))
    moment = time.perf_counter() + 0.2
    asyncio.run(wait_until(moment))
    assert time.perf_counter() >= moment
