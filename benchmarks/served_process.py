# SPDX-License-Identifier: Apache-2.0
"""A server in a process group of its own, and the CPU time of its parts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import httpx
import psutil
from typing_extensions import Self

_STOP_S = 60.0
#: a server without a model
_START_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Cpu:
    """User and system seconds of a process."""

    user_s: float
    system_s: float

    def since(self, before: Cpu) -> Cpu:
        return Cpu(self.user_s - before.user_s, self.system_s - before.system_s)


@dataclass(frozen=True)
class ServerCpu:
    """User and system seconds, and how many API processes were seen."""

    num_api: int
    api_s: float
    engine_s: float


def start_python(
    arguments: list[str], environment: dict[str, str] | None
) -> subprocess.Popen[bytes]:
    """`python ARGUMENTS` in a session of its own."""
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, start_new_session=True, env=environment)


class ServedProcess:
    """`python COMMAND --port PORT` in a session of its own: ready on entering the context, gone on
    leaving it, children too. Raises `RuntimeError` when it is not ready within `timeout_s`.

    `environment` is its whole environment, by default this process's. Meanwhile SIGTERM ends this
    process as an exit does, so that the server does not outlive it; the main thread enters.

    API processes are those that had connections while somebody was `watching`, and the first one;
    everything else is the engine. (A core that was forked listens on the port, too.)
    """

    def __init__(
        self, command: list[str], timeout_s: float, environment: dict[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._timeout_s = timeout_s
        self._api_pids: set[int] = set()
        self._process = start_python([*command, "--port", str(self.port)], environment)
        self.process = psutil.Process(self._process.pid)

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        deadline = time.monotonic() + self._timeout_s
        try:
            with httpx.Client(base_url=self.url, trust_env=False, verify=False) as client:
                while time.monotonic() < deadline and self._process.poll() is None:
                    with contextlib.suppress(httpx.TransportError):
                        if client.get("/health").status_code == 200:
                            return self
                    time.sleep(0.1)
            if (status := self._process.poll()) is not None:
                raise RuntimeError(f"the server ended with status {status} before it was ready")
            raise RuntimeError(f"the server was not ready within {self._timeout_s:g} s")
        except BaseException:
            self._stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    @contextlib.contextmanager
    def watching(self, interval_s: float) -> Iterator[None]:
        """Look for processes with connections meanwhile, in a thread."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(interval_s):
                self._api_pids |= {p.pid for p in self._processes() if self._is_connected(p)}

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def cpu(self) -> dict[int, float]:
        """User and system seconds so far of every process, by its id."""
        found = {}
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
        return found

    def spent(self, before: dict[int, float]) -> ServerCpu:
        """Since `before`. What a process is may have been seen only meanwhile."""
        api_s = engine_s = 0.0
        for pid, seconds in self.cpu().items():
            seconds -= before.get(pid, 0.0)
            if pid in self._api_pids or pid == self._process.pid:
                api_s += seconds
            else:
                engine_s += seconds
        return ServerCpu(max(1, len(self._api_pids)), api_s, engine_s)

    def wait(self, timeout_s: float) -> int:
        """Its exit status; raises `subprocess.TimeoutExpired`."""
        return self._process.wait(timeout_s)

    def _processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def _is_connected(self, process: psutil.Process) -> bool:
        try:
            sockets = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        return any(
            s.status == psutil.CONN_ESTABLISHED and s.laddr.port == self.port for s in sockets
        )

    def _stop(self) -> None:
        """SIGTERM to the server, then SIGKILL to whatever is left of its group."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        signal.signal(signal.SIGTERM, self._before)


class TokenServer(ServedProcess):
    """`benchmarks.token_source` with these flags."""

    def __init__(self, *flags: str) -> None:
        super().__init__(["-m", "benchmarks.token_source", *flags], _START_S)

    def api_cpu(self) -> Cpu:
        """Of the API process so far, without its children."""
        times = self.process.cpu_times()
        return Cpu(times.user, times.system)
