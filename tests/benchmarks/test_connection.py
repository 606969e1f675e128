# SPDX-License-Identifier: Apache-2.0
"""HTTP connections of the load, against bytes that servers send."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.benchmarks.scripted_server import END, HEAD, ScriptedServer, chunk
from tests.ports import free_port
from vllm.benchmarks import connection
from vllm.benchmarks.connection import ConnectionPool, Endpoint, ExchangeError, Reply
from vllm.benchmarks.load import tls_context

OK = b"HTTP/1.1 200 OK\r\n"
SIZED = OK + b"Content-Length: 2\r\n\r\nab"
Script = Sequence[tuple[float, bytes | None]]


async def ask(
    pool: ConnectionPool, endpoint: Endpoint, count: int = 1, awaits_end: bool = False
) -> list[Reply]:
    """With `awaits_end` each request comes after the end of the connection before it."""
    replies = []
    for _ in range(count):
        reply = Reply()
        await pool.exchange(endpoint.request({}, b"{}"), reply)
        replies.append(reply)
        while awaits_end and any(one.reusable for one in pool._idle):
            await asyncio.sleep(0.001)
    return replies


def exchange(
    script: Script, count: int = 1, awaits_end: bool = False
) -> tuple[list[Reply], ScriptedServer]:
    with ScriptedServer({"": script}) as server:
        endpoint = Endpoint(server.url + "/x")
        pool = ConnectionPool(endpoint)

        async def main() -> list[Reply]:
            try:
                return await ask(pool, endpoint, count, awaits_end)
            finally:
                pool.close()

        return asyncio.run(main()), server


def test_a_chunked_body_and_its_times() -> None:
    script = [(0.0, HEAD), (0.1, chunk(b"a") + chunk(b"b")), (0.1, chunk(b"c")[:3]), (0.1, b"")]
    script += [(0.0, chunk(b"c")[3:]), (0.1, END)]
    for _ in range(5):  # what comes while this process gets no processor is read at once
        [reply], server = exchange(script)
        writes = server.visits[0].writes
        assert reply.body == b"abc" and reply.status == 200
        assert reply.times[0] >= writes[1] and reply.times[-1] >= writes[2]
        if reply.ends == [2, 3] and reply.times[1] - reply.times[0] > 0.05:
            return
    pytest.fail(f"bytes up to {reply.ends} were read at {reply.times}")


@pytest.mark.parametrize(
    "script",
    [
        [(0.0, SIZED)],
        [(0.0, b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED)],
        [(0.0, OK + b"\r\nab"), (0.0, None)],
        [(0.0, bytes([byte])) for byte in HEAD + chunk(b"ab") + END],
        [(0.0, HEAD + chunk(b"ab") + END), (0.0, None)],
    ],
    ids=["length", "interim", "until close", "byte by byte", "closed after"],
)
def test_every_way_to_frame_a_body(script: Script) -> None:
    [reply], _ = exchange(script)
    assert reply.body == b"ab" and reply.status == 200


def test_connections_are_used_again() -> None:
    replies, server = exchange([(0.0, SIZED)], count=3)
    assert [bytes(reply.body) for reply in replies] == [b"ab"] * 3
    assert server.num_connections == 1 and len(server.visits) == 3


def test_connections_that_end_are_not() -> None:
    _, server = exchange([(0.0, OK + b"Connection: close\r\nContent-Length: 0\r\n\r\n")], count=3)
    assert server.num_connections == 3
    _, server = exchange([(0.0, SIZED), (0.0, None)], count=3, awaits_end=True)
    assert server.num_connections == 3


def test_connections_that_were_idle_for_long_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MAX_IDLE_S", 0.0)
    _, server = exchange([(0.0, SIZED)], count=3)
    assert server.num_connections == 3


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([(0.0, None)], "closed the connection"),
        ([(0.0, HEAD + chunk(b"a")), (0.0, None)], "closed the connection"),
        ([(0.0, OK + b"Content-Length: 3\r\n\r\nab"), (0.0, None)], "closed the connection"),
        ([(0.0, b"SSH-2.0-hello\r\n")], "not a HTTP reply"),
        ([(0.0, OK + b"Content-Encoding: gzip\r\nContent-Length: 0\r\n\r\n")], "encoded as gzip"),
    ],
)
def test_replies_that_are_not_whole(script: Script, words: str) -> None:
    with pytest.raises(ExchangeError, match=words):
        exchange(script)


def test_no_server() -> None:
    endpoint = Endpoint(f"http://127.0.0.1:{free_port()}/")
    with pytest.raises(ExchangeError, match="cannot connect: .*127.0.0.1"):
        asyncio.run(ask(ConnectionPool(endpoint), endpoint))


def test_a_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CONNECT_TIMEOUT_S", 0.0)
    endpoint = Endpoint("http://127.0.0.1:1/")
    with pytest.raises(ExchangeError, match="no connection within 0 s"):
        asyncio.run(ask(ConnectionPool(endpoint), endpoint))


def test_tls_and_whose_certificates_are_trusted(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl program, which makes the certificate, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=x", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ScriptedServer({"": [(0.0, SIZED)]}, context) as server:
        endpoint = Endpoint(server.url)
        [reply] = asyncio.run(ask(ConnectionPool(endpoint, tls_context(verify=False)), endpoint))
        assert reply.body == b"ab" and endpoint.tls
        with pytest.raises(ExchangeError, match="cannot connect: .*self-signed certificate"):
            asyncio.run(ask(ConnectionPool(endpoint, tls_context(verify=True)), endpoint))
