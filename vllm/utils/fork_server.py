# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from one that has imported what they need.

Importing torch, transformers and an application takes seconds of a core and hundreds of megabytes.
The *fork server* is a process that has done it and does nothing else: it has no threads, no device
and no connection but the one on which `start` asks it for processes. It is forked itself, from a
process that can be forked yet, and ends with that one. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Protocol

from vllm import decisions, envs
from vllm.exceptions import ExplainedError
from vllm.utils.imports import gc_paused
from vllm.utils.interrupts import ignore_interrupts, interrupts_wait
from vllm.utils.start_method import reason_not_to_fork, start_method

if TYPE_CHECKING:
    import psutil

#: files that can travel with a request
_MOST_FILES = 16
#: what tells a process to stop; the fork server ignores it
_STOPS = (signal.SIGINT, signal.SIGTERM)
#: exit code of a process whose end nobody knows, because the fork server is gone
_EXIT_UNKNOWN = 255
#: processes that lost the fork server end by themselves in less, or cannot; killed ones in less
_ORPHANS_S, _KILLED_S = 30.0, 5.0
#: between two looks at them
_LOOK_S = 0.02


class Closable(Protocol):
    """A file of some kind."""

    def close(self) -> None: ...


class StartedProcess(Protocol):
    """What `BaseProcess` and `ForkedProcess` have in common."""

    @property
    def pid(self) -> int | None: ...
    @property
    def sentinel(self) -> int: ...
    @property
    def exitcode(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class ForkError(ExplainedError, RuntimeError):
    """The fork server is gone, or cannot be forked."""


class ForkedProcess:
    """A process that the fork server has forked: as `multiprocessing.Process`, from its start.

    Its exit code is 255 once the fork server is gone; the process ends then, if it watches its
    parent.
    """

    def __init__(self, status: Connection) -> None:
        """`status`: where the fork server tells the process id, and at its end the exit code."""
        self._status = status
        self._exitcode: int | None = None
        try:
            answer = status.recv()
        except (EOFError, OSError):
            raise ForkError("the process that others are forked from is gone") from None
        if isinstance(answer, Exception):
            raise answer
        self.pid: int = answer

    @property
    def sentinel(self) -> int:
        """A file that can be read when the process has ended."""
        return self._status.fileno()

    @property
    def exitcode(self) -> int | None:
        """Negative for a signal; None while it runs."""
        self.join(0.0)
        return self._exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        if self._exitcode is None and self._status.poll(timeout):
            try:
                self._exitcode = self._status.recv()
            except (EOFError, OSError):
                self._exitcode = _EXIT_UNKNOWN

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _Pickler(pickle.Pickler):
    """Pickles what a process starts from; connections and sockets travel as `files`."""

    def __init__(self, data: io.BytesIO) -> None:
        super().__init__(data)
        self.files: list[int] = []

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, Connection | socket.socket):
            return None
        self.files.append(obj.fileno())
        modes = (obj.readable, obj.writable) if isinstance(obj, Connection) else ()
        return (len(self.files) - 1, *modes)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, files: Sequence[int]) -> None:
        super().__init__(io.BytesIO(data))
        self._files = files

    def persistent_load(self, found: tuple[Any, ...]) -> Connection | socket.socket:
        index, *modes = found
        file = self._files[index]
        return Connection(file, *modes) if modes else socket.socket(fileno=file)


class _ForkServer:
    """This end of its connection."""

    def __init__(self, modules: Sequence[str], foreign: Sequence[Closable]) -> None:
        #: that it has forked, but for those that have ended
        self._forked: list[psutil.Process] = []
        self._requests, theirs = socket.socketpair()
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve,
            args=(theirs, modules, [*foreign, self._requests]),
            name="vllm-fork-server",
        )
        with interrupts_wait():
            self._process.start()
        theirs.close()

    def fork(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> ForkedProcess:
        """See `start`."""
        import psutil

        pickler = _Pickler(data := io.BytesIO())
        pickler.dump((name, dict(os.environ), target, args))
        ours, theirs = multiprocessing.Pipe()
        with contextlib.suppress(OSError):  # it is gone, as `ForkedProcess` finds
            with theirs:
                socket.send_fds(self._requests, [b"\0"], [theirs.fileno(), *pickler.files])
            ours.send_bytes(data.getvalue())
        process = ForkedProcess(ours)
        self._forget_ended()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._forked.append(psutil.Process(process.pid))
        return process

    def close(self) -> None:
        """End it and what it has forked, and wait for that: what comes next may need their
        addresses and devices. What still runs has lost its parent, and is killed if it has not
        ended by itself after `_ORPHANS_S`."""
        import psutil

        self._requests.close()
        self._process.join()
        self._wait_for_ends(_ORPHANS_S)
        for process in self._forked:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._wait_for_ends(_KILLED_S)

    def _wait_for_ends(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._forked and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            self._forget_ended()

    def _forget_ended(self) -> None:
        self._forked = [process for process in self._forked if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    """Not a zombie: it has ended, and whoever inherits orphans may never ask for it."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_server: _ForkServer | None = None


@contextlib.contextmanager
def fork_server(modules: Sequence[str], foreign: Sequence[Closable] = ()) -> Iterator[None]:
    """Inside the block `start` forks processes from one that imports `modules`, beginning now.

    Not where `VLLM_WORKER_MULTIPROC_METHOD` asks for another way, or where this process cannot be
    forked any more, which is recorded. `foreign`: open connections of this process alone.
    """
    global _server
    reason = reason_not_to_fork() if envs.VLLM_WORKER_MULTIPROC_METHOD == "fork" else None
    if reason is not None:
        decisions.record("fork server", "none", reason, instead_of="processes that share imports")
    elif envs.VLLM_WORKER_MULTIPROC_METHOD == "fork":
        _server = _ForkServer(modules, foreign)
    try:
        yield
    finally:
        server, _server = _server, None
        if server is not None:
            server.close()


def start(
    what: str, target: Callable[..., None], args: tuple[Any, ...], name: str
) -> StartedProcess:
    """Start a process that calls `target(*args)`, for `what`: forked from the fork server where
    there is one, else as `start_method` says. It has this process's environment, and ignores
    interrupts from its first moment: whoever starts it ends it.

    Connections and sockets among `args` may be closed here afterwards. Raises `ForkError`.
    """
    if _server is not None:
        return _server.fork(target, args, name)
    method = start_method(what)
    context: Any = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=_begin, args=(target, args), name=name)
    if method != "fork":
        with interrupts_wait():  # where it begins, it lets them through
            resource_tracker.ensure_running()
    with interrupts_wait():
        process.start()
    return process


def _begin(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    ignore_interrupts()
    target(*args)


def _serve(requests: socket.socket, modules: Sequence[str], foreign: Sequence[Closable]) -> None:
    """The fork server: until nobody can ask any more."""
    # It outlives what it has forked, also when all processes of a group are told to stop.
    ignore_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for file in foreign:
        file.close()
    with gc_paused():
        for module in modules:
            importlib.import_module(module)
    # A collection in a forked process would write to every page of what it shares.
    gc.collect()
    gc.freeze()
    running: dict[int, tuple[BaseProcess, Connection]] = {}
    while True:
        ready = wait([requests, *running])
        for sentinel in [one for one in running if one in ready]:
            process, status = running.pop(sentinel)
            process.join()
            _tell(status, process.exitcode)
            status.close()
        if requests in ready:
            _, files, _, _ = socket.recv_fds(requests, 1, _MOST_FILES)
            if not files:
                os._exit(0)  # without waiting for those that are running: they watch this process
            _fork(requests, files, running)


def _fork(
    requests: socket.socket, files: list[int], running: dict[int, tuple[BaseProcess, Connection]]
) -> None:
    for file in files:
        os.set_inheritable(file, False)
    status = Connection(files[0])
    if (reason := reason_not_to_fork()) is not None:
        _tell(status, ForkError(f"the fork server cannot be forked: {reason}"))
        status.close()
    else:
        foreign = [requests, *(other for _, other in running.values())]
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(status, files[1:], foreign)
        )
        # A signal that comes before the process heeds it waits until then.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        running[process.sentinel] = (process, status)
        _tell(status, process.pid)
    for file in files[1:]:
        os.close(file)


def _tell(status: Connection, answer: int | Exception | None) -> None:
    with contextlib.suppress(OSError):  # whoever asked is gone
        status.send(answer)


def _run(status: Connection, files: list[int], foreign: Sequence[Closable]) -> None:
    """In the new process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    for file in foreign:
        file.close()
    try:
        data = status.recv_bytes()
    except EOFError:  # whoever asked is gone
        return
    status.close()
    name, environment, target, args = _Unpickler(data, files).load()
    multiprocessing.current_process().name = name
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
