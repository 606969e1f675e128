# SPDX-License-Identifier: Apache-2.0
"""The fuzzer finds what it is for: faults that the engine once had, put back."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import pytest

from tests.fuzz.scenarios import Fuzzer
from vllm.v1.core.checkpoint_keeper import CheckpointKeeper
from vllm.v1.core.idle_queue import IdleQueue
from vllm.v1.core.sched.results import SchedulerResults
from vllm.v1.worker import worker

pytestmark = pytest.mark.slow


#: scenarios in one of which each must show
NUM_SEEDS = 12


@pytest.fixture
def fuzzer() -> Iterator[Fuzzer]:
    with Fuzzer() as made:
        yield made


def finds(
    fuzzer: Fuzzer, what: str, way: str, families: list[str], extracts: bool | None, first: int = 1
) -> bool:
    """Whether a scenario finds it. `first` is where it shows as scenarios are drawn today, and
    those after it are tried when they are drawn otherwise."""
    return any(
        what in finding
        for seed in (1 + (first - 1 + more) % NUM_SEEDS for more in range(NUM_SEEDS))
        for finding in fuzzer.run(seed, way, families, extracts).findings
    )


def test_a_reset_of_running_requests_that_kills_the_engine(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint was worth less than nothing, and pages of equal rank were compared."""
    cache = CheckpointKeeper._cache

    def cache_from_first_hit(keeper, manager, request, block, start, position):
        cache(keeper, manager, request, block, max(request.num_cached_tokens, 0), position)

    def add_by_rank(queue, item):
        number = queue._queued[item] = item.rank[1]
        heapq.heappush(queue._heap, (item.rank, number, item))

    monkeypatch.setattr(CheckpointKeeper, "_cache", cache_from_first_hit)
    monkeypatch.setattr(IdleQueue, "add", add_by_rank)
    error = "not supported between instances of 'Page' and 'Page'"
    assert finds(fuzzer, error, "alone", ["qwen3_5"], None, first=9)


def test_a_file_with_a_row_more_than_the_reply_counts(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core saved at a request's own end before it heard of a stop string."""
    monkeypatch.setattr(
        SchedulerResults,
        "_finish_or_wait",
        lambda self, request: request.last_output(self._finish(request)),
    )
    assert finds(fuzzer, "tokens, the reply counts", "served", ["llama"], True)


def test_a_connector_that_two_engines_share(
    fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine bound the first one's saver to its own memory."""
    fuzzer.run(0, "alone", ["llama"], True)  # the engine to compare with keeps its own
    shared = worker.ConnectorSlot()
    monkeypatch.setattr(worker, "ConnectorSlot", lambda: shared)
    assert finds(fuzzer, "hidden rows differ", "pair", ["llama", "llama"], True, first=8)
