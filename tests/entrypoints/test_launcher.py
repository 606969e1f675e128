# SPDX-License-Identifier: Apache-2.0
"""The server process: sockets, signals, exit status; real TCP, fake engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.forked_python import ForkedPython
from tests.ports import free_port
from vllm.entrypoints.launcher import check_certificates
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.slow

Start = Callable[..., "Process"]


class Process:
    """A running `fake_server`."""

    def __init__(self, behaviour: str, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # Without certificates, which take longer to read than the requests, and without idle
        # connections, which `--max-connections` would count.
        one_request = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self.url, verify=False, timeout=120, limits=one_request)
        self.log = tempfile.TemporaryFile()
        self.popen = ForkedPython(
            "tests.entrypoints.fake_server",
            ["--host", "127.0.0.1", "--port", str(self.port), *flags],
            self.log,
            env={**os.environ, "FAKE_ENGINE": behaviour},
        )

    def ready(self) -> Process:
        for _ in range(2400):
            assert self.popen.poll() is None, self.output()
            try:
                if self.http.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError("the server did not become ready")

    def output(self) -> str:
        """Everything that it has printed."""
        return os.pread(self.log.fileno(), 1 << 20, 0).decode()

    def printed(self, text: str) -> None:
        """Wait for a line with `text`."""
        while text not in self.output():
            if self.popen.poll() is not None:
                assert text in self.output(), f"the server ended without it: {self.output()}"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = 120) -> tuple[int, str]:
        return self.popen.wait(timeout_s), self.output()


@pytest.fixture
def start() -> Iterator[Start]:
    processes = []

    def make(behaviour: str = "", *flags: str) -> Process:
        processes.append(Process(behaviour, *flags))
        return processes[-1]

    yield make
    for process in processes:
        process.popen.kill()
        process.popen.wait()
        process.http.close()
        process.log.close()


def open_stream(process: Process, seen: list[str]) -> threading.Thread:
    """Read a stream in a thread; it is open when this returns."""
    first = threading.Event()

    def read() -> None:
        body = {"prompt": "hi", "stream": True, "max_tokens": 5}
        try:
            with process.http.stream("POST", "/v1/completions", json=body) as reply:
                for line in reply.iter_lines():
                    seen.append(line)
                    first.set()
        except httpx.TransportError as error:
            seen.append(f"broken: {error}")

    thread = threading.Thread(target=read)
    thread.start()
    assert first.wait(60)
    return thread


@pytest.mark.parametrize(
    ("number", "flags", "logged"),
    [
        (signal.SIGTERM, ["--disable-access-log-for-endpoints", "/health,/ping"], ["/version?x=1"]),
        (signal.SIGINT, ["--disable-uvicorn-access-log"], []),
    ],
)
def test_signal_stops_cleanly(
    start: Start, number: int, flags: list[str], logged: list[str]
) -> None:
    """The access log shows what its flags leave of it."""
    process = start("", *flags).ready()
    process.http.get("/version?x=1")
    process.http.get("/ping?x=1")
    process.signal(number)
    status, output = process.wait()
    assert status == 0, output
    assert re.findall(r"GET (\S+) HTTP", output) == logged


def test_running_requests_get_the_shutdown_timeout(start: Start) -> None:
    process = start("hang", "--shutdown-timeout", "1", "--max-connections", "3").ready()
    seen: list[str] = []
    thread = open_stream(process, seen)
    refused = over_the_limit(process)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert "--max-connections" in refused.json()["error"]["message"]
    began = time.monotonic()
    process.signal(signal.SIGTERM)
    status, output = process.wait()
    thread.join(60)
    assert status == 0, output
    assert time.monotonic() - began > 0.9
    *_, error, _, done, _ = seen
    assert "shutting down" in error and done == "data: [DONE]"


def over_the_limit(process: Process) -> httpx.Response:
    """The reply on a fourth connection: one streams, two are idle."""
    address = ("127.0.0.1", process.port)
    with socket.create_connection(address), socket.create_connection(address):
        return process.http.get("/version")


def test_new_requests_are_refused_while_running_ones_finish(start: Start) -> None:
    process = start("hang", "--shutdown-timeout", "5").ready()
    seen: list[str] = []
    thread = open_stream(process, seen)
    kept = httpx.Client(base_url=process.url, verify=False, timeout=120)
    kept.get("/version")
    process.signal(signal.SIGTERM)
    process.printed("no new ones")
    # The loop looks at the signal now and then.
    while process.http.get("/ping").status_code == 200:
        time.sleep(0.01)
    for client in (process.http, kept):  # on a new connection, and on one from before
        for path in ("/v1/completions", "/ping"):
            refused = client.post(path, json={"prompt": "a"})
            error = refused.json()["error"]
            assert refused.status_code == error["code"] == 503
            assert "shutting down" in error["message"] and "retry-after" not in refused.headers
    kept.close()
    status, output = process.wait()
    thread.join(60)
    assert status == 0, output
    *_, error, _, done, _ = seen
    assert "shutting down" in error and done == "data: [DONE]"


def test_second_signal_exits_at_once(start: Start) -> None:
    process = start("hang", "--shutdown-timeout", "600").ready()
    seen: list[str] = []
    thread = open_stream(process, seen)
    process.signal(signal.SIGTERM)
    process.printed("finishing running requests")
    process.signal(signal.SIGTERM)
    status, _ = process.wait()
    thread.join(60)
    assert status == 130


def test_signal_while_starting(start: Start) -> None:
    process = start("slow")
    process.printed("starting")
    process.signal(signal.SIGTERM)
    status, _ = process.wait(50)
    assert status == 128 + signal.SIGTERM


def test_a_signal_while_starting_is_not_lost(start: Start) -> None:
    status, output = start("dropped").wait(50)
    assert status == 128 + signal.SIGTERM
    assert "listening on" not in output


def test_engine_death_fails_requests_and_ends_the_process(start: Start) -> None:
    process = start("die").ready()
    reply = process.http.post("/v1/completions", json={"prompt": "hi"})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "InternalServerError"
    assert "dead" in reply.json()["error"]["message"]
    status, output = process.wait()
    assert status == 1 and "the engine died" in output


def test_keep_alive_after_engine_death(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    process = start("die").ready()
    process.http.post("/v1/completions", json={"prompt": "hi"})
    process.printed("serving errors")
    assert process.http.get("/health").status_code == 503
    process.signal(signal.SIGTERM)
    assert process.wait()[0] == 1


def test_failing_start_names_its_cause_last(start: Start) -> None:
    status, output = start("fail").wait()
    assert status == 1
    last = output.strip().splitlines()[-1]
    assert last == "vllm serve: error: RuntimeError: no such checkpoint; at /nowhere"


def test_port_in_use_fails_before_the_engine(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, output = start("slow", "--port", str(taken.getsockname()[1])).wait()
    assert status == 1
    assert "cannot listen on 127.0.0.1" in output.strip().splitlines()[-1]
    assert "starting" not in output


def test_a_port_lost_while_starting_ends_the_server(start: Start) -> None:
    """It would seem to serve, and no request would ever reach it."""
    process = start("overtaken")
    status, output = process.wait()
    assert status == 1
    assert "listening on" not in output
    last = output.strip().splitlines()[-1]
    assert f"cannot listen on 127.0.0.1:{process.port}: Address already in use" in last


def test_missing_certificate_is_named() -> None:
    check_certificates(FrontEndArgs())
    with pytest.raises(VLLMValidationError, match="--ssl-certfile /none.*No such file"):
        check_certificates(FrontEndArgs(ssl_certfile="/none", ssl_keyfile="/none"))


@pytest.mark.parametrize(("times", "status"), [(1, 0), (2, 130)])
def test_unix_socket(start: Start, tmp_path: Path, times: int, status: int) -> None:
    path = str(tmp_path / "server.sock")
    process = start("hang", "--uds", path)
    client = httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x")
    for _ in range(2400):
        try:
            assert client.get("/health").status_code == 200
            break
        except httpx.TransportError:
            time.sleep(0.05)
    assert os.path.exists(path)
    open_streams: list[httpx.Response] = []
    if times == 2:
        stream = {"prompt": "hi", "stream": True, "max_tokens": 5}
        request = client.build_request("POST", "/v1/completions", json=stream)
        open_streams.append(client.send(request, stream=True))
        process.signal(signal.SIGTERM)
        process.printed("finishing running requests")
    process.signal(signal.SIGTERM)
    assert process.wait()[0] == status
    assert not os.path.exists(path)


def test_https_with_a_required_client_certificate(start: Start, tmp_path: Path) -> None:
    """One self-signed pair is the server's certificate, the client's, and their authority."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl program, which makes the certificate, is not installed")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        + ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        + ["-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    files = {"ssl_keyfile": key, "ssl_certfile": certificate}
    check_certificates(FrontEndArgs(**files, ssl_ca_certs=certificate, ssl_cert_reqs=2))
    for wrong in ({"ssl_ca_certs": key}, {"ssl_cert_reqs": 3}, {"ssl_ciphers": "none such"}):
        with pytest.raises(VLLMValidationError, match="TLS cannot be set up"):
            check_certificates(FrontEndArgs(**files, **wrong))
    pair = ["--ssl-keyfile", key, "--ssl-certfile", certificate]
    process = start("", *pair, "--ssl-ca-certs", certificate, "--ssl-cert-reqs", "2")
    process.printed("listening on")
    url = process.url.replace("http", "https") + "/version"
    context = ssl.create_default_context(cafile=certificate)
    with pytest.raises(httpx.TransportError):
        fetch(url, context)
    context.load_cert_chain(certificate, key)
    assert fetch(url, context).status_code == 200
    with pytest.raises(httpx.TransportError):
        fetch(process.url + "/version", context)


def fetch(url: str, context: ssl.SSLContext) -> httpx.Response:
    """The reply, once the server listens."""
    for _ in range(2400):
        try:
            return httpx.get(url, verify=context)
        except httpx.ConnectError as error:
            if "refused" not in str(error):
                raise
            time.sleep(0.05)
    raise AssertionError("the server never listened")


def test_leaving_over_tcp_aborts(start: Start) -> None:
    process = start("hang").ready()
    body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 5}).encode()
    with socket.create_connection(("127.0.0.1", process.port)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert b"200 OK" in sock.recv(4096)
        assert process.http.get("/load").json() == {"server_load": 1}
    for _ in range(1200):
        if process.http.get("/load").json() == {"server_load": 0}:
            return
        time.sleep(0.05)
    raise AssertionError("the request survived its client")
