# SPDX-License-Identifier: Apache-2.0
"""Python programs as processes of their own, without each importing torch and transformers again.

`ForkedPython("a.b", ["--flag"], log)` is `python -m a.b --flag` (`.../b.py` instead of `a.b`: that
script) but for its beginning: it is forked
from a process that has imported what programs of ours import, which takes seconds, and does nothing
else. What a test says about imports, or about the first moments of a program, needs a fresh
interpreter (`subprocess`). Programs that compile Triton kernels are forked from a process of their
own: whether kernels are interpreted is decided when Triton is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
#: what servers, their engines and the tests' own programs import
_MODULES = (
    "vllm.v1.engine.core_proc",
    "vllm.v1.worker.worker",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.llm",
    "transformers.models.auto.tokenization_auto",
    # which imports the compiler, to name activation functions
    "transformers.models.llama.configuration_llama",
)
#: read when a package is imported or Python starts: the same for all of them
_FIXED = ("PYTHON", "OMP_", "MKL_", "TRITON_", "LD_")
#: of these, what is read whenever it is needed
_READ_LATE = "TRITON_CACHE_DIR"
_INTERPRET = "TRITON_INTERPRET"
_MAX_MESSAGE = 1 << 17


class ForkedPython:
    """A running `python -m MODULE ARGUMENTS` that writes stdout and stderr to `log`.

    `pid`, `poll`, `wait`, `send_signal` and `kill` are those of `subprocess.Popen`. With `session`
    it leads a session and a process group. ValueError for variables that came too late.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: IO[Any],
        errors: IO[Any] | None = None,
        env: Mapping[str, str] | None = None,
        session: bool = False,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        origin = _origin(_INTERPRET in environment)
        origin.check(environment)
        self.returncode: int | None = None
        self._module = module
        self._status, status = os.pipe()
        request = (module, [*arguments], os.getcwd(), environment, session)
        origin.send(request, [log.fileno(), (errors or log).fileno(), status])
        os.close(status)
        self.pid = int(self._read())

    def _read(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._status, 1)
            if not byte:
                raise RuntimeError(f"the process that {self._module} is forked from is gone")
            line += byte
        return line.decode()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._poll(0.0)

    def _poll(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            self.returncode = int(self._read())
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises `subprocess.TimeoutExpired`."""
        status = self._poll(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self._module, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class CapturedPython(ForkedPython):
    """One whose output is kept: `communicate` as `subprocess.Popen` has it."""

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._out, self._err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        super().__init__(module, arguments, self._out, self._err, env)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Everything that it wrote to stdout and stderr, once it has ended."""
        self.wait(timeout)
        for file in (self._out, self._err):
            file.seek(0)
        return self._out.read(), self._err.read()


def run_python(
    module: str, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `python -m MODULE ARGUMENTS`, or of the script MODULE.py."""
    process = CapturedPython(module, *arguments, env=env)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess([module, *arguments], process.wait(), out, err)


@contextlib.contextmanager
def talking_python(script: Path, code: str) -> Iterator[tuple[ForkedPython, IO[str]]]:
    """A process that runs `code`, written to `script`, and what it prints, as it comes; the output
    ends when every process that has it has. The process is killed at the end of the block."""
    script.write_text(code)
    reads, writes = os.pipe()
    with open(reads) as output:
        with open(writes, "w") as log:
            process = ForkedPython(str(script), [], log)
        try:
            yield process, output
        finally:
            process.kill()
            process.wait()


class _Origin:
    """A process that those of a test process are forked from; it ends with the test process."""

    def __init__(self, interprets: bool) -> None:
        self._environment = dict(os.environ)
        if not interprets:
            self._environment.pop(_INTERPRET, None)
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={**self._environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def check(self, environment: Mapping[str, str]) -> None:
        late = [
            name
            for name in environment.keys() | self._environment.keys()
            if name.startswith(_FIXED)
            and name != _READ_LATE
            and environment.get(name) != self._environment.get(name)
        ]
        if late:
            raise ValueError(f"{', '.join(late)}: needs a fresh interpreter (subprocess)")

    def send(self, request: Any, files: list[int]) -> None:
        socket.send_fds(self._socket, [pickle.dumps(request)], files)

    def end(self) -> None:
        """With the test process, which then has its processor time."""
        self._socket.close()
        self._process.wait()


@functools.cache
def _origin(interprets: bool) -> _Origin:
    origin = _Origin(interprets)
    atexit.register(origin.end)
    return origin


def _await_request(requests: socket.socket) -> tuple[Any, list[int]] | None:
    """In a new process, the request that it is for; None when there will be no more."""
    # SIGCHLD's number arrives in `ended`.
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        ready = select.select([requests, ended], [], [])[0]
        if ended in ready:
            ended.recv(4096)
            _report(statuses)
        if requests not in ready:
            continue
        message, files, _, _ = socket.recv_fds(requests, _MAX_MESSAGE, 3)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (requests, ended, wake):
                inherited.close()
            for status in statuses.values():
                os.close(status)
            return pickle.loads(message), files
        *logs, status = files
        for log in logs:
            os.close(log)
        statuses[pid] = status
        os.write(status, f"{pid}\n".encode())


def _report(statuses: dict[int, int]) -> None:
    """Tell how each process ended that has."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        # Nobody reads it when the test has not waited.
        with contextlib.suppress(BrokenPipeError):
            os.write(statuses[pid], f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(statuses.pop(pid))


def _become(request: Any, files: list[int]) -> None:
    """Run a request's program as this process."""
    module, arguments, directory, environment, session = request
    if session:
        os.setsid()
    # Interrupts are answered even where the tests ignore them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out, err, status = files
    os.dup2(out, 1)
    os.dup2(err, 2)
    for file in (out, err, status):
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.argv[:] = [module, *arguments]
    sys.modules.pop(module, None)
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _main() -> None:
    gc.disable()
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        found = _await_request(requests)
    if found is not None:
        _become(*found)


if __name__ == "__main__":
    _main()
