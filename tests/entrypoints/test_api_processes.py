# SPDX-License-Identifier: Apache-2.0
"""Several API processes in front of one engine core: real processes and TCP, a model of no cost."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import psutil
import pytest

from tests.forked_python import ForkedPython
from tests.ports import free_port
from vllm.config import VllmConfig
from vllm.decisions import DecisionLog
from vllm.entrypoints.api_processes.serve import choose_count
from vllm.entrypoints.openai.cli_args import AUTO

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
#: `max_num_seqs` of the server, and what it lets wait
RUNNING, QUEUED = 8, 4
STEP_MS = 20


class Server:
    """A running `many_processes`."""

    def __init__(self, log: Path, *flags: str, uds: str | None = None) -> None:
        self.port = free_port()
        where = ["--uds", uds] if uds else ["--host", "127.0.0.1", "--port", str(self.port)]
        self.log = log
        self.uds = uds
        with log.open("w") as out:
            self.popen = ForkedPython(
                "tests.entrypoints.many_processes",
                [*where, *flags],
                out,
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "STEP_MS": str(STEP_MS)},
            )
        self.process = psutil.Process(self.popen.pid)

    def client(self) -> httpx.Client:
        """Opens a connection for every request, so that any process may get it."""
        transport = httpx.HTTPTransport(
            uds=self.uds, limits=httpx.Limits(max_keepalive_connections=0)
        )
        url = f"http://127.0.0.1:{self.port}"
        return httpx.Client(base_url=url, transport=transport, timeout=120)

    def ready(self) -> Server:
        def healthy() -> bool:
            assert self.popen.poll() is None, self.log.read_text()
            try:
                return self.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(healthy)
        return self

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, **body: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        found = re.findall(
            rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics").text, re.M
        )
        return sum(map(float, found))

    def serving(self) -> list[int]:
        """Process ids of those that have been said to serve and still live."""
        started = re.findall(r"Started server process \[(\d+)\]", self.log.read_text())
        living = {child.pid for child in self.process.children(recursive=True)}
        return [pid for pid in map(int, started) if pid in living]

    def stop(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(60)


def wait_until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


class Stream(threading.Thread):
    """A streaming client: what it has read, and how that ended."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.body = {"prompt": "a", "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
        self.text = ""
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with (
                self.server.client() as client,
                client.stream("POST", COMPLETIONS, json=self.body) as reply,
            ):
                for piece in reply.iter_text():
                    self.text += piece
        except httpx.HTTPError as error:
            self.error = error

    @property
    def ids(self) -> set[str]:
        return set(re.findall(r'"id":"([^"]+)"', self.text))

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.text.endswith("data: [DONE]\n\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ["-asc", "3", "--max-queued-requests", str(QUEUED)]
    running = Server(log, *flags).ready()
    wait_until(lambda: len(running.serving()) == 3)
    yield running
    assert running.stop() == 0, log.read_text()
    assert not psutil.pid_exists(running.popen.pid)


def test_metrics_are_those_of_all_processes(server: Server) -> None:
    names = ("vllm:generation_tokens_total", "vllm:request_success_total")
    before = [server.metric(name) for name in names]
    with ThreadPoolExecutor(4) as pool:
        body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
        replies = list(pool.map(lambda _: server.post(COMPLETIONS, **body), range(12)))
    assert {reply.status_code for reply in replies} == {200}
    assert [server.metric(name) for name in names] == [before[0] + 60, before[1] + 12]
    assert server.metric("vllm:cache_config_info") == 1
    assert server.metric("vllm:engine_sleep_state") == 1
    assert server.get("/v1/models").json()["data"][0]["id"] == "tokens"


def test_every_process_serves(server: Server) -> None:
    def cpu_s() -> dict[int, float]:
        return {pid: sum(psutil.Process(pid).cpu_times()[:2]) for pid in server.serving()}

    before = cpu_s()
    assert len(before) == 3

    def all_have_worked() -> bool:
        # A process's clock ticks in 10 ms, tens of these requests.
        assert server.get("/health").status_code == 200
        return all(now > before[pid] for pid, now in cpu_s().items())

    wait_until(all_have_worked)


def test_one_limit_for_all_processes(server: Server) -> None:
    streams = [Stream(server, 2000) for _ in range(RUNNING + QUEUED)]
    wait_until(lambda: server.get("/load").json()["server_load"] == len(streams))
    for _ in range(6):
        refused = server.post(COMPLETIONS, prompt="a", max_tokens=1)
        assert refused.status_code == 503 and "retry-after" in refused.headers
    wait_until(lambda: sum(bool(stream.ids) for stream in streams) >= RUNNING)
    # Any process ends requests of all.
    wait_until(lambda: not _abort(server, streams))
    assert all(stream.is_whole for stream in streams)
    wait_until(lambda: server.get("/load").json()["server_load"] == 0)
    assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200


def _abort(server: Server, streams: list[Stream]) -> bool:
    """Abort what has shown its id; whether anything runs still."""
    running = [stream for stream in streams if stream.is_alive()]
    ids = [one for stream in running for one in stream.ids]
    assert server.post("/abort_requests", request_ids=ids).status_code == 200
    for stream in running:
        stream.join(0.05)
    return any(stream.is_alive() for stream in streams)


def test_all_sleep_when_one_is_asked(server: Server) -> None:
    streams = [Stream(server, 2000) for _ in range(4)]
    wait_until(lambda: all(stream.ids for stream in streams))
    with server.client() as client:
        assert client.post("/sleep", params={"level": 1}).status_code == 200
    for stream in streams:
        stream.join(60)
        assert stream.is_whole and '"finish_reason":"abort"' in stream.text
    for _ in range(8):
        assert server.get("/is_sleeping").json() == {"is_sleeping": True}
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 503
    assert 'sleep_state="weights_offloaded"} 1.0' in server.get("/metrics").text
    with server.client() as client:
        assert client.post("/sleep", params={"level": 7}).status_code == 400
        assert client.post("/wake_up").status_code == 200
    for _ in range(8):
        assert server.get("/is_sleeping").json() == {"is_sleeping": False}
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200
    assert 'sleep_state="awake"} 1.0' in server.get("/metrics").text


def test_calls_reach_the_one_engine(server: Server) -> None:
    before = server.post("/collective_rpc", method="note").json()["results"][0]
    found = [server.post("/collective_rpc", method="note").json()["results"][0] for _ in range(6)]
    assert {one["pid"] for one in found} == {before["pid"]}
    assert [len(one["calls"]) for one in found] == [len(before["calls"]) + i for i in range(1, 7)]
    assert server.post("/reset_prefix_cache").status_code == 200


def test_a_killed_process_takes_only_its_own_requests_with_it(server: Server) -> None:
    before = set(server.serving())
    victim = server.serving()[0]
    fork_server = psutil.Process(victim).ppid()
    streams = [Stream(server, 150) for _ in range(RUNNING)]
    wait_until(lambda: all(stream.ids for stream in streams))
    counted = server.metric("vllm:prompt_tokens_total")
    os.kill(victim, signal.SIGKILL)
    for stream in streams:
        stream.join(60)
    lost = [stream for stream in streams if stream.error is not None]
    assert all(stream.is_whole for stream in streams if stream not in lost)
    # The core forgets them, the limit does not count them, and what was counted stays.
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    wait_until(lambda: server.get("/load").json()["server_load"] == 0)
    wait_until(lambda: len(server.serving()) == 3 and victim not in server.serving())
    # Whoever took its place has shared what the others have imported.
    (new,) = set(server.serving()) - before
    assert psutil.Process(new).ppid() == fork_server
    assert sum(psutil.Process(new).cpu_times()[:2]) < 2.0
    assert server.metric("vllm:prompt_tokens_total") >= counted
    for _ in range(9):
        assert server.post(COMPLETIONS, prompt="a", max_tokens=2).status_code == 200


def test_a_process_that_starts_while_a_part_sleeps_wakes_up_with_the_others(
    server: Server,
) -> None:
    with server.client() as client:
        assert client.post("/sleep", params={"level": 1}).status_code == 200
        assert client.post("/wake_up", params={"tags": "weights"}).status_code == 200
        victim = server.serving()[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(server.serving()) == 3 and victim not in server.serving())
        for _ in range(9):
            assert server.get("/is_sleeping").json() == {"is_sleeping": True}
        assert client.post("/wake_up", params={"tags": "kv_cache"}).status_code == 200
    for _ in range(12):
        assert server.get("/is_sleeping").json() == {"is_sleeping": False}


def test_each_process_listens_at_its_own_socket_alone(server: Server) -> None:
    processes = [psutil.Process(pid) for pid in server.serving()]
    (fork_server,) = {one.ppid() for one in processes}
    listening = [
        [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        for process in (*processes, psutil.Process(fork_server))
    ]
    assert [len(found) for found in listening] == [1, 1, 1, 0]


@pytest.mark.parametrize("is_supervisor", [True, False])
def test_nothing_is_left_behind_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_supervisor: bool
) -> None:
    """Neither of the supervisor nor of the process that the others are forked from. Requests that
    run are not waited for longer than the grace."""
    monkeypatch.setenv("ORPHAN_GRACE_S", "1")
    server = Server(tmp_path / "log", "-asc", "2").ready()
    try:
        wait_until(lambda: len(server.serving()) == 2)
        everyone = server.process.children(recursive=True)
        assert len(everyone) >= 4, "two API processes, what they are forked from, and the core"
        stream = Stream(server, 2000)
        wait_until(lambda: bool(stream.ids))
        files = _files(server.process)
        assert {file.name for file in files} >= {"tallies", "requests-0"}
        fork_server = psutil.Process(server.serving()[0]).ppid()
        os.kill(server.popen.pid if is_supervisor else fork_server, signal.SIGKILL)
        assert server.popen.wait(60) == (-signal.SIGKILL if is_supervisor else 1)
        wait_until(lambda: not [one for one in everyone if _runs(one)])
        assert not [file for file in files if file.parent.exists()]
    finally:
        server.popen.kill()


def _files(supervisor: psutil.Process) -> list[Path]:
    """Its own that others have too: numbers that they share, and sockets."""
    maps = [one.path for one in supervisor.memory_maps()]
    sockets = [str(one.laddr) for one in supervisor.net_connections("unix")]
    return [Path(path) for path in (*maps, *sockets) if "/vllm-" in path]


def _runs(process: psutil.Process) -> bool:
    """Whether it does: one that has ended may wait for a system without an init process."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_unix_socket_and_a_server_that_stops_with_its_process(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    flags = ["-asc", "2", "--api-server-death", "stop"]
    server = Server(tmp_path / "log", *flags, uds=path).ready()
    try:
        wait_until(lambda: len(server.serving()) == 2)
        assert server.post(COMPLETIONS, prompt="a", max_tokens=2).status_code == 200
        os.kill(server.serving()[0], signal.SIGKILL)
        assert server.popen.wait(60) == 1
        assert not Path(path).exists()
    finally:
        server.popen.kill()


@pytest.mark.parametrize("over_uds", [False, True])
def test_a_server_that_stops_answers_everyone_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over_uds: bool
) -> None:
    """Processes without requests end at once: what connects goes to those that still run one. A
    second signal ends these, too."""
    with tempfile.TemporaryDirectory() as temporary:  # its name is short enough for a socket's
        monkeypatch.setenv("TMPDIR", temporary)
        path = f"{temporary}/socket" if over_uds else None
        flags = ["-asc", "3", "--shutdown-timeout", "600"]
        server = Server(tmp_path / "log", *flags, uds=path).ready()
        try:
            wait_until(lambda: len(server.serving()) == 3)
            stream = Stream(server, 2000)
            wait_until(lambda: bool(stream.ids))
            server.popen.send_signal(signal.SIGTERM)
            wait_until(lambda: len(server.serving()) == 1)
            wait_until(lambda: _answers(server) == 503)
            assert [server.get("/health").status_code for _ in range(12)] == [503] * 12
            server.popen.send_signal(signal.SIGTERM)
            assert server.popen.wait(60) == 130
            assert os.listdir(temporary) == []
        finally:
            server.popen.kill()


def _answers(server: Server) -> int | None:
    """Status of `/health`; None where the process ended with the connection."""
    try:
        return server.get("/health").status_code
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return None


def test_the_engines_death_ends_all_processes(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "-asc", "2").ready()
    try:
        wait_until(lambda: len(server.serving()) == 2)
        stream = Stream(server, 2000)
        wait_until(lambda: bool(stream.ids))
        try:
            server.post("/collective_rpc", method="die")
        except httpx.TransportError:
            pass
        assert server.popen.wait(60) == 1, server.log.read_text()
        stream.join(60)
        (last,) = re.findall(r'data: (\{"error".*)\n', stream.text)
        assert json.loads(last)["error"]["code"] == 500
    finally:
        server.popen.kill()


@pytest.mark.parametrize(
    ("asked", "max_num_seqs", "replicas", "cores", "count"),
    [(3, 8, 1, 2, 3), (AUTO, 256, 1, 64, 1), (AUTO, 1024, 1, 64, 4), (AUTO, 1024, 1, 6, 2),
     (AUTO, 9999, 1, 64, 8), (AUTO, 1024, 1, 2, 1), (AUTO, 256, 3, 64, 3)],
)  # fmt: skip
def test_auto_is_as_many_as_are_of_use(
    asked: int, max_num_seqs: int, replicas: int, cores: int, count: int
) -> None:
    scheduler = SimpleNamespace(max_num_seqs=max_num_seqs)
    config = SimpleNamespace(
        scheduler_config=scheduler,
        parallel_config=SimpleNamespace(local_ranks=range(replicas)),
        decisions=DecisionLog(),
    )
    assert choose_count(asked, cast(VllmConfig, config), cores) == count
    made = [one for one in config.decisions.decisions() if one.what == "API server processes"]
    assert [one.chosen for one in made] == ([str(count)] if asked == AUTO else [])
