# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from one that has imported what they need: what they have, what they
have not, and how all of them end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm import decisions
from vllm.utils import fork_server as module
from vllm.utils.fork_server import ForkedProcess, ForkError, fork_server, start
from vllm.utils.parent_watch import watch_parent

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forking")]

#: of the module that only the fork server imports
NAME = "module_that_forked_processes_share"
FORKED = "forked-by-a-test"


@dataclass(frozen=True)
class Seen:
    """What a process finds at its beginning."""

    modules: set[str]
    files: list[str]
    environment: dict[str, str]
    name: str
    num_threads: int
    handlers: tuple[object, ...]
    is_daemon: bool
    cpu_s: float
    own_bytes: int
    bytes: int


def look(answer: Connection) -> None:
    memory = psutil.Process().memory_full_info()
    seen = Seen(
        set(sys.modules),
        open_files(),
        dict(os.environ),
        multiprocessing.current_process().name,
        psutil.Process().num_threads(),
        tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)),
        multiprocessing.current_process().daemon,
        time.process_time(),
        memory.uss,
        memory.rss,
    )
    answer.send(seen)


def open_files() -> list[str]:
    """What each of this process's descriptors leads to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            """It was the one of the listing."""
    return found


def inode_of(file: Connection | socket.socket) -> str:
    return os.readlink(f"/proc/self/fd/{file.fileno()}")


def sleep(answer: Connection | None = None) -> None:
    watch_parent(0.1)
    if answer is not None:
        answer.send(os.getppid())
    time.sleep(600)


def leave(code: int) -> None:
    raise SystemExit(code)


def serve_one(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.sendall(b"served")
    connection.close()


def begin(target: Callable[..., None], *args: object) -> ForkedProcess:
    process = start("test", target, args, FORKED)
    assert isinstance(process, ForkedProcess)
    return process


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module for the fork server, to be written."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / f"{NAME}.py"
    path.write_text("x = 1\n")
    return path


def test_a_process_has_the_imports_and_its_arguments_and_nothing_else(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = open_files()
    monkeypatch.setenv("EARLY", "1")
    foreign, other = multiprocessing.Pipe(duplex=False)
    with foreign, other, fork_server([NAME], [foreign, other]), socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        late.listen()
        monkeypatch.delenv("EARLY")
        monkeypatch.setenv("LATE", "1")
        sibling = begin(sleep)
        ours, theirs = multiprocessing.Pipe()
        theirs_inode = inode_of(theirs)
        process = begin(look, theirs)
        theirs.close()
        seen: Seen = ours.recv()
        process.join(60)
        assert process.exitcode == 0
        sibling.kill()
        strange = {inode_of(foreign), inode_of(other), inode_of(late)}
        requests = {inode_of(module._server._requests)} if module._server else set()
    assert NAME in seen.modules and NAME not in sys.modules
    assert "LATE" in seen.environment and "EARLY" not in seen.environment
    assert seen.name == FORKED and seen.num_threads == 1 and not seen.is_daemon
    assert seen.handlers == (signal.SIG_IGN, signal.SIG_DFL)
    # Pipes that are neither are multiprocessing's own, between processes and their parents.
    new = [file for file in seen.files if file not in kept]
    assert theirs_inode in new and not {*new} & (strange | requests)
    assert sum(file.startswith("socket:") for file in new) == 1, new


def test_a_process_costs_next_to_nothing_and_shares_its_memory() -> None:
    with fork_server(()):
        ours, theirs = multiprocessing.Pipe()
        begin(look, theirs)
        theirs.close()
        seen: Seen = ours.recv()
    assert "torch" in seen.modules
    assert seen.cpu_s < 0.5, "importing torch alone takes longer"
    assert seen.own_bytes < seen.bytes / 4


def test_a_socket_travels() -> None:
    with fork_server(()), socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        begin(serve_one, listener)
        with socket.create_connection(listener.getsockname(), 60) as client:
            assert client.recv(100) == b"served"


def test_how_a_process_ends_is_known() -> None:
    with fork_server(()):
        left, killed, terminated = begin(leave, 3), begin(sleep), begin(sleep)
        assert killed.is_alive() and killed.exitcode is None
        killed.join(0.01)
        assert killed.is_alive()
        killed.kill()
        terminated.terminate()
        waiting = {left.sentinel, killed.sentinel, terminated.sentinel}
        while waiting:
            waiting -= set(wait([*waiting], 60))
        codes = [one.exitcode for one in (left, killed, terminated)]
        assert codes == [3, -signal.SIGKILL, -signal.SIGTERM]
        # Nobody is left to be waited for, and a second signal meets nobody else.
        assert not any(psutil.pid_exists(one.pid) for one in (left, killed, terminated))
        killed.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_a_process_has_begun(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """One that tells it to stop is not lost, although the fork server ignores it. An interrupt is
    for whoever has started the process."""
    run = module._run

    def late(*args: Any) -> None:
        time.sleep(0.3)
        run(*args)

    monkeypatch.setattr(module, "_run", late)
    with fork_server(()):
        process = begin(sleep)
        os.kill(process.pid, number)
        if number is signal.SIGINT:
            process.join(1)
            assert process.exitcode is None
            process.terminate()
        process.join(20)
        assert process.exitcode == -signal.SIGTERM


def test_many_at_once() -> None:
    with fork_server(()):
        codes: dict[int, int | None] = {}

        def run(code: int) -> None:
            process = begin(leave, code)
            process.join()
            codes[code] = process.exitcode

        threads = [threading.Thread(target=run, args=(code,)) for code in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert codes == {code: code for code in range(8)}


def test_signals_to_all_processes_leave_the_fork_server() -> None:
    with fork_server(()):
        server = psutil.Process(psutil.Process(begin(sleep).pid).ppid())
        for number in (signal.SIGINT, signal.SIGTERM):
            server.send_signal(number)
        process = begin(leave, 5)
        process.join(60)
        assert process.exitcode == 5 and server.is_running()
    assert not server.is_running(), "it ends with the block"


def test_without_the_fork_server_there_are_no_new_processes_and_the_old_ones_end() -> None:
    with fork_server(()):
        ours, theirs = multiprocessing.Pipe()
        process = begin(sleep, theirs)
        theirs.close()
        os.kill(ours.recv(), signal.SIGKILL)
        process.join(60)
        assert process.exitcode == 255
        wait_until(lambda: not psutil.pid_exists(process.pid))
        with pytest.raises(ForkError, match="is gone"):
            begin(leave, 0)


def end_late(answer: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch_parent(1.0)
    answer.send(os.getppid())
    time.sleep(600)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_end_waits_for_those_that_lost_the_fork_server(
    monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """What follows finds their addresses and devices free; one that cannot end is killed."""
    monkeypatch.setattr(module, "_ORPHANS_S", 2.0 if is_stopped else 60.0)
    with fork_server(()):
        ours, theirs = multiprocessing.Pipe()
        process = psutil.Process(begin(end_late, theirs).pid)
        theirs.close()
        parent = ours.recv()
        if is_stopped:
            process.suspend()
        os.kill(parent, signal.SIGKILL)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _hold(told: Connection) -> None:
    """A process with a fork server, to be killed."""
    with fork_server(()):
        _, theirs = multiprocessing.Pipe()
        process = begin(sleep, theirs)
        told.send([process.pid, psutil.Process(process.pid).ppid()])
        time.sleep(600)


def test_a_killed_process_leaves_nothing_behind() -> None:
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=_hold, args=(theirs,))
    holder.start()
    pids: list[int] = ours.recv()
    assert all(map(psutil.pid_exists, pids))
    holder.kill()
    holder.join()
    wait_until(lambda: not any(map(_runs, pids)))


def _runs(pid: int) -> bool:
    """Whether it does: one that has ended may wait for a system without an init process."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "import vllm.utils.start_method as s\ns.cuda_is_initialised = lambda: True",
            "CUDA is initialised",
        ),
        ("import sys; sys.modules['ray'] = sys", "Ray is imported"),
        ("import vllm.utils.start_method as s\ns._other_threads = lambda: [1]", "runs threads"),
    ],
)
def test_a_fork_server_that_is_not_clean_is_not_forked(shared: Path, source: str, why: str) -> None:
    shared.write_text(source)
    with fork_server([NAME]), pytest.raises(ForkError, match=why):
        begin(leave, 0)


def test_a_module_that_fails_is_an_error(shared: Path) -> None:
    shared.write_text("raise ImportError('of a test')")
    with fork_server([NAME]), pytest.raises(ForkError, match="is gone"):
        begin(leave, 0)


def test_a_process_that_uses_cuda_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.utils.start_method.cuda_is_initialised", lambda: True)
    log = decisions.DecisionLog()
    with log.current(), fork_server(()):
        assert module._server is None
    (record,) = [one for one in log.decisions() if one.what == "fork server"]
    assert record.chosen == "none" and "CUDA is initialised" in record.why


def test_who_asks_to_spawn_gets_what_is_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    log = decisions.DecisionLog()
    with log.current(), fork_server(()):
        process = start("test", time.sleep, (600,), FORKED)
        assert isinstance(process, SpawnProcess)
        process.kill()
        process.join()
    assert not [one for one in log.decisions() if one.what == "fork server"]


#: an import of a front end has no device, no thread and no choice of a platform
_CLEAN = """
import importlib, threading
from vllm.utils.imports import import_heavy_modules
from vllm.entrypoints.api_processes.process import APPLICATION
import_heavy_modules()
for name in APPLICATION:
    importlib.import_module(name)
import torch
from vllm import platforms
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert not torch.cuda.is_initialized() and torch.cuda._cached_device_count is None
assert platforms._current is None
assert not [line for line in open("/proc/self/maps") if "libcuda.so" in line]
"""


def test_what_api_processes_share_begins_nothing() -> None:
    command = [sys.executable, "-c", _CLEAN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert module._server is None
