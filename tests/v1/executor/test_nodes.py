# SPDX-License-Identifier: Apache-2.0
"""Workers on two hosts, which here are two trees of processes: how they meet, work and end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.v1.executor.fake_worker import FakeWorker, filled, gone, processes, step, wait_until
from tests.v1.executor.quick_clock import end_soon
from tests.v1.executor.two_hosts import WAIT_S, Hosts, Node
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.executor import node_link, stationed
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.node import NodeEndedError, NodeRefusedError, run_node
from vllm.v1.executor.station import WorkerDiedError
from vllm.v1.worker import worker as worker_module

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forking")]


@pytest.fixture
def make_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hosts]]:
    monkeypatch.setattr(worker_module, "Worker", FakeWorker)
    end_soon(monkeypatch)
    made: list[Hosts] = []

    def make(**parallel: Any) -> Hosts:
        made.append(Hosts(**parallel))
        return made[-1]

    yield make
    for hosts in made:
        hosts.end()


@pytest.fixture
def hosts(make_hosts: Callable[..., Hosts]) -> Hosts:
    return make_hosts()


def test_both_hosts_take_steps_and_calls(hosts: Hosts) -> None:
    executor, node = hosts.both()
    futures = [step(executor, number) for number in range(20)]
    assert executor.collective_rpc(lambda worker: (worker.rank, worker.steps)) == [
        (0, list(range(20))),
        (1, list(range(20))),
    ]
    assert [future.result(WAIT_S).req_ids for future in futures] == [["0"]] * 20
    assert executor.collective_rpc("place") == [(0, 0), (1, 0)], "the first of its host each"
    pids = executor.collective_rpc("pid")
    assert [psutil.Process(pid).ppid() for pid in pids] == [os.getpid(), node.process.pid]
    shown = {d.what: d for d in hosts.config.decisions.decisions()}
    assert shown["hosts"].chosen == "2, 1 workers each"
    assert shown["hosts"].why == "others: node 1 (127.0.0.1, rank 1)"
    assert shown["network interface of collectives"].chosen == "lo"
    with pytest.raises(VLLMValidationError, match="not me"):
        executor.collective_rpc("refuse")
    executor.check_health()


def test_large_messages_cross(hosts: Hosts) -> None:
    """Larger than all buffers, in both directions."""
    executor, _ = hosts.both()
    content = os.urandom(9 * 2**20)
    assert executor.collective_rpc("echo", args=(content,)) == [content, content]


def test_the_last_stage_on_another_host_answers_and_has_the_masks(
    make_hosts: Callable[..., Hosts],
) -> None:
    hosts = make_hosts(tensor_parallel_size=1, pipeline_parallel_size=2)
    executor, _ = hosts.both()
    masked, plain = step(executor, 0, "masks"), step(executor, 1)
    executor.send_token_masks(filled(7))
    assert masked.result(WAIT_S).sampled_token_ids == [[0], [[7]]]
    assert plain.result(WAIT_S).req_ids == ["1"]


def test_hosts_have_equally_many_ranks_in_order(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(tensor_parallel_size=4)
    executor, node = hosts.both()
    assert executor.collective_rpc("place") == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert len(node.tree()) == 3


def test_a_stop_is_no_failure(hosts: Hosts, tmp_path: Path) -> None:
    hosts.config.additional_config = {"farewell": str(tmp_path)}
    executor, node = hosts.both()
    workers = processes(executor)
    executor.shutdown()
    assert gone(workers) and sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]
    assert node.result() is None


def test_a_failure_of_the_engine_is_no_stop(hosts: Hosts) -> None:
    """Nothing that workers or connections could show."""
    executor, node = hosts.both()
    executor.shutdown("the scheduler cannot")
    error = node.result()
    assert isinstance(error, NodeEndedError) and "ended the engine: the scheduler" in str(error)


def test_a_start_that_is_stopped_says_so(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    monkeypatch.setattr(node_link, "check_equal_devices", stop)
    node = hosts.node()
    with pytest.raises(SystemExit):
        hosts.executor()
    error = node.result()
    assert isinstance(error, NodeRefusedError) and "not start: it was told to stop" in str(error)


def test_a_host_that_dies_ends_all(hosts: Hosts) -> None:
    executor, node = hosts.both()
    failures: list[Exception] = []
    executor.register_failure_callback(failures.append)
    workers = processes(executor)
    waiting = step(executor, 0, "masks")
    os.kill(node.process.pid or 0, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"node 1 .127.0.0.1, rank 1. is gone"):
        waiting.result(WAIT_S)
    wait_until(lambda: len(failures) == 1)
    wait_until(lambda: gone(workers))
    with pytest.raises(WorkerDiedError, match="node 1"):
        step(executor, 1)


@pytest.mark.parametrize("during_step", [False, True])
def test_a_worker_that_dies_on_another_host_ends_all(hosts: Hosts, during_step: bool) -> None:
    executor, node = hosts.both()
    workers = processes(executor)
    waiting = step(executor, 0, "die 1" if during_step else "")
    if not during_step:
        waiting.result(WAIT_S)
        workers[1].kill()
    named = r"the worker of rank 1 died \(SIGKILL\), on node 1 \(127.0.0.1, rank 1\)"
    error = node.result()
    assert isinstance(error, NodeEndedError)
    with pytest.raises(WorkerDiedError, match=named):
        executor.check_health()
    assert "node 0 at 127.0.0.1" in str(error) and "the worker of rank 1 died" in str(error)
    wait_until(lambda: gone(workers))


def test_a_worker_that_dies_on_the_first_host_ends_all(hosts: Hosts) -> None:
    executor, node = hosts.both()
    workers = processes(executor)
    workers[0].kill()
    error = node.result()
    assert isinstance(error, NodeEndedError)
    assert "ended the engine: the worker of rank 0 died (SIGKILL)" in str(error)
    wait_until(lambda: gone(workers))


def test_an_error_that_a_death_elsewhere_has_caused_is_not_the_cause(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host's collectives fail before it hears of the death."""
    monkeypatch.setattr(stationed, "_BLAME_OF_HOSTS_S", WAIT_S)
    executor, _ = hosts.both()
    workers = processes(executor)
    workers[1].suspend()
    killer = threading.Timer(0.3, workers[1].kill)
    killer.start()
    with pytest.raises(WorkerDiedError, match="rank 1 died"):
        step(executor, 0, "fail 0").result(WAIT_S)


def test_a_failing_step_on_another_host_keeps_its_error(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stationed, "_BLAME_OF_HOSTS_S", 0.1)
    executor, node = hosts.both()
    workers = processes(executor)
    step(executor, 0, "fail 1")
    with pytest.raises(RuntimeError, match="rank 1 cannot"):
        step(executor, 1, "hang").result(WAIT_S)
    assert isinstance(node.result(), NodeEndedError)
    wait_until(lambda: gone(workers))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_start_keeps_its_error(hosts: Hosts, rank: int) -> None:
    hosts.config.additional_config = {"fails": rank}
    node = hosts.node()
    with pytest.raises(VLLMValidationError, match="checkpoint is not there"):
        hosts.executor()
    error = node.result()
    assert isinstance(error, NodeEndedError) and "checkpoint is not there" in str(error)


def _start_and_tell(config: VllmConfig, pids: Connection) -> None:
    executor = MultiprocExecutor(config)
    pids.send(executor.collective_rpc("pid"))
    time.sleep(600)


def test_other_hosts_end_with_the_first_one(hosts: Hosts) -> None:
    node = hosts.node()
    context = multiprocessing.get_context("fork")
    pids, theirs = context.Pipe(duplex=False)
    first = context.Process(target=_start_and_tell, args=(hosts.config, theirs))
    first.start()
    workers = [psutil.Process(pid) for pid in pids.recv()]
    first.kill()
    first.join()
    error = node.result()
    assert isinstance(error, NodeEndedError)
    assert f"node 0 at 127.0.0.1:{hosts.port} is gone" in str(error)
    wait_until(lambda: gone(workers))


def test_a_host_that_is_told_to_stop_says_so(hosts: Hosts) -> None:
    executor, node = hosts.both()
    workers = processes(executor)
    node.process.terminate()
    assert isinstance(node.result(), SystemExit)
    wait_until(lambda: gone(workers))
    with pytest.raises(WorkerDiedError, match=r"node 1 .* ended: it was told to stop"):
        executor.check_health()


def test_settings_that_differ_are_named_on_both_hosts(hosts: Hosts) -> None:
    node = Node(hosts.config, enable_expert_parallel=True)
    hosts.nodes.append(node)
    differ = "--enable-expert-parallel is true on node 1 and false on node 0"
    with pytest.raises(VLLMValidationError, match=differ) as caught:
        hosts.executor()
    assert caught.value.parameter == "node_rank"
    error = node.result()
    assert isinstance(error, NodeRefusedError) and differ in str(error)


def test_a_host_that_never_comes_is_named(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(distributed_timeout_seconds=1)
    with pytest.raises(TimeoutError, match=r"node 1 has not come to .* in 1 s .*--node-rank 1"):
        hosts.executor()
    with pytest.raises(TimeoutError, match=r"node 0 at .* does not answer in 1 s"):
        run_node(hosts.config)


def test_a_host_that_leaves_before_the_others_have_come(
    make_hosts: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaving(node_link.NodeLink):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            node.process.kill()

    monkeypatch.setattr(node_link, "NodeLink", Leaving)
    hosts = make_hosts(tensor_parallel_size=3, nnodes=3)
    node = hosts.node()
    with pytest.raises(WorkerDiedError, match=r"node 1 .* left before all hosts had come"):
        hosts.executor()


def test_two_hosts_of_one_rank(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(tensor_parallel_size=3, nnodes=3)
    nodes = [hosts.node(), hosts.node()]
    with pytest.raises(VLLMValidationError, match="--node-rank 1 is another host's"):
        hosts.executor()
    for node in nodes:
        error = node.result()
        assert isinstance(error, NodeRefusedError) and "--node-rank 1" in str(error)


def test_strangers_are_no_hosts(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that says something else nor one that says nothing."""
    monkeypatch.setattr(node_link, "_HELLO_S", 1.0)
    listen = node_link.listen
    strangers: list[socket.socket] = []

    def visited(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\x02" + bytes(7) + b"{}"):
            strangers.append(socket.create_connection(listener.getsockname()))
            strangers[-1].sendall(words)
        strangers[0].shutdown(socket.SHUT_WR)
        hosts.node()
        return listener

    monkeypatch.setattr(node_link, "listen", visited)
    executor = hosts.executor()
    assert executor.collective_rpc("place") == [(0, 0), (1, 0)]
    for stranger in strangers:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("0.0.0.0", "--master-addr 0.0.0.0 is every address"),
        ("192.0.2.1", "192.0.2.1 is no address of"),
    ],
)
def test_it_listens_where_it_is_told(
    make_hosts: Callable[..., Hosts], address: str, words: str
) -> None:
    hosts = make_hosts(master_addr=address)
    with pytest.raises(VLLMValidationError, match=words):
        hosts.executor()


def test_only_the_given_address_is_open(hosts: Hosts) -> None:
    """What this process listens at more than before; the workers' collectives are in the
    end-to-end tests."""

    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections()
        return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}

    before = listening()
    executor, _ = hosts.both()
    assert {host for host, _ in listening() - before} == {"127.0.0.1"}
    executor.check_health()


def test_a_large_configuration_crosses(hosts: Hosts) -> None:
    """Larger than all buffers, as code of a checkpoint that is sent with it may be."""
    hosts.config.additional_config = {"large": "x" * 9 * 2**20}
    executor, _ = hosts.both()
    assert executor.collective_rpc("place") == [(0, 0), (1, 0)]
