# SPDX-License-Identifier: Apache-2.0
"""How the process of `vllm proxy` ends."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any

import httpx
import pytest

from tests.forked_python import ForkedPython
from tests.ports import free_port

pytestmark = pytest.mark.slow


class Decode(ThreadingHTTPServer):
    """A server for answers, which come once `release` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked, self.release = threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Decode

    def do_GET(self) -> None:
        self._reply(b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.set()
        self.server.release.wait(60)
        self._reply(b'{"id": "mine"}')

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Nothing: the proxy looks once a second."""


@pytest.fixture
def decode() -> Iterator[Decode]:
    server = Decode()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


class Proxy(ForkedPython):
    """A process of the command before one server for answers."""

    def __init__(self, decode: Decode, log: IO[Any]) -> None:
        self.url, self._log = f"http://127.0.0.1:{(port := free_port())}", log
        ends = ["--prefill", f"http://127.0.0.1:{free_port()}", "--decode"]
        ends += [f"http://127.0.0.1:{decode.server_port}", "--port", str(port)]
        super().__init__("vllm.entrypoints.cli.main", ["proxy", *ends], log)

    def output(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False).is_success
        except httpx.TransportError:
            assert self.poll() is None, self.output()
            return False


@pytest.fixture
def proxy(decode: Decode) -> Iterator[Proxy]:
    with tempfile.TemporaryFile() as log:
        process = Proxy(decode, log)
        while not process.answers():
            time.sleep(0.02)
        yield process
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_when_requests_have_their_answers(
    decode: Decode, proxy: Proxy, number: int
) -> None:
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(_complete, proxy)
        assert decode.asked.wait(60)
        proxy.send_signal(number)
        while "finishing running requests" not in proxy.output() and proxy.poll() is None:
            time.sleep(0.02)
        decode.release.set()
        assert reply.result().json() == {"id": "mine"}
    assert proxy.wait(60) == 0, proxy.output()
    assert "Traceback" not in proxy.output()


def test_a_second_signal_ends_it_at_once(decode: Decode, proxy: Proxy) -> None:
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(_complete, proxy)
        assert decode.asked.wait(60)
        while proxy.poll() is None:
            proxy.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        with pytest.raises(httpx.TransportError):
            reply.result()
    assert proxy.wait(60) == 130, proxy.output()
    assert "Traceback" not in proxy.output()


def _complete(proxy: Proxy) -> httpx.Response:
    body = {"model": "m", "prompt": "hi"}
    return httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=60, trust_env=False)
