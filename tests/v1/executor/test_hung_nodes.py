# SPDX-License-Identifier: Apache-2.0
"""Hosts whose process, or whose worker, is stopped while the first host waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.v1.executor.fake_worker import FakeWorker, gone, processes
from tests.v1.executor.hangs import END_S
from tests.v1.executor.quick_clock import LIMIT_S, end_soon, use_quick_clock
from tests.v1.executor.two_hosts import Hosts
from vllm.exceptions import HangError
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.node import NodeEndedError
from vllm.v1.worker import worker as worker_module

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forking")]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setattr(worker_module, "Worker", FakeWorker)
    use_quick_clock(monkeypatch)
    end_soon(monkeypatch)
    made = Hosts()
    yield made
    made.end()


def ask(executor: MultiprocExecutor) -> list[int]:
    answers: list[int] = executor.collective_rpc("echo", args=(7,))
    return answers


@pytest.mark.parametrize("part", ["host", "worker"])
def test_a_part_of_a_host_that_is_stopped_is_named(hosts: Hosts, part: str) -> None:
    executor, node = hosts.both()
    workers = processes(executor)
    assert ask(executor) == [7, 7]
    stopped = node.tree()[0 if part == "host" else 1]
    stopped.suspend()
    began = time.monotonic()
    named = r"rank 1 does not go on, for 3 s: .*rank 1 of node 1 \(127.0.0.1, rank 1\) .*any more"
    with pytest.raises(HangError, match=named):
        ask(executor)
    executor.shutdown()
    assert time.monotonic() - began < END_S
    with contextlib.suppress(psutil.NoSuchProcess):  # the host has ended its worker
        stopped.resume()
    assert isinstance(node.result(), NodeEndedError) and gone(workers)


def test_a_host_that_goes_on_early_is_not_ended(hosts: Hosts) -> None:
    executor, node = hosts.both()
    assert ask(executor) == [7, 7]
    host = node.tree()[0]
    host.suspend()
    time.sleep(LIMIT_S / 2)
    host.resume()
    assert ask(executor) == [7, 7]


def test_a_worker_that_works_without_a_word_is_not_ended(hosts: Hosts) -> None:
    """A host sees what its workers do."""
    executor, _ = hosts.both()

    def keep_the_interpreter(worker: FakeWorker) -> float:
        """`sum` lets no other thread run."""
        began = time.monotonic()
        while worker.rank == 1 and time.monotonic() - began < 2 * LIMIT_S:
            sum(range(100_000_000))
        return time.monotonic() - began

    assert executor.collective_rpc(keep_the_interpreter)[1] > 2 * LIMIT_S
