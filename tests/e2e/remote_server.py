# SPDX-License-Identifier: Apache-2.0
"""A real server in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import openai
import psutil

from tests.forked_python import ForkedPython
from tests.ports import free_port

#: the `vllm` command
MAIN = "vllm.entrypoints.cli.main"

#: seconds until a tiny model must be ready, on a busy machine
_START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 90.0


class RemoteServer:
    """`vllm serve MODEL FLAGS`, ready on entering the context and gone, children too, on leaving.

    `http` is a client for its paths, one connection per request. A `fresh` one imports everything
    itself, which takes seconds, and chooses how its processes start, as users' servers do. Raises
    `RuntimeError` with the server's log when it does not start.
    """

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        env: dict[str, str] | None = None,
        fresh: bool = False,
    ) -> None:
        self.port = free_port()
        self.model = str(model)
        self.url = f"http://127.0.0.1:{self.port}"
        # `httpx.get` and the like would read all certificates of the machine for every request.
        one_request = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self.url, verify=False, timeout=120, limits=one_request)
        self._log = tempfile.NamedTemporaryFile(prefix="vllm-server-", suffix=".log")  # noqa: SIM115
        arguments = ["serve", self.model, "--host", "127.0.0.1", "--port", str(self.port), *flags]
        defaults = {"VLLM_CPU_KVCACHE_SPACE": "0.05"}
        if not fresh:
            # A spawned process would import everything again, for seconds.
            defaults["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        env = {**defaults, **os.environ, **(env or {})}
        self.process: subprocess.Popen[bytes] | ForkedPython
        if fresh:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MAIN, *arguments],
                env=env,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            self.process = ForkedPython(MAIN, arguments, self._log, env=env, session=True)

    def __enter__(self) -> RemoteServer:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.process.returncode}\n{self.log()}")
            if self.is_healthy():
                return self
            time.sleep(0.05)
        self._kill_group()
        raise RuntimeError(f"the server was not ready in {_START_TIMEOUT_S} s\n{self.log()}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_TIMEOUT_S)
        self._kill_group()
        if error is not None:
            print(self.log(), file=sys.stderr)
        self.http.close()
        self._log.close()

    def is_healthy(self) -> bool:
        """Whether it serves now."""
        with contextlib.suppress(httpx.TransportError):
            return self.http.get("/health").status_code == 200
        return False

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        """Everything the server printed."""
        return Path(self._log.name).read_text(errors="replace")

    def wait(self, timeout_s: float = _STOP_TIMEOUT_S) -> int:
        """Exit status; raises `subprocess.TimeoutExpired`."""
        return self.process.wait(timeout_s)

    def children(self) -> list[psutil.Process]:
        """Every process the server started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """JSON of the reply, which must have `status`."""
        reply = self.http.post(path, json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def get(self, path: str) -> Any:
        """JSON of the reply."""
        reply = self.http.get(path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(
            base_url=self.url + "/v1", api_key="EMPTY", max_retries=0, timeout=120, **options
        )
