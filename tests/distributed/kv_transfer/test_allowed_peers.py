# SPDX-License-Identifier: Apache-2.0
"""A client can send an engine to allowed peers alone, and what a peer answers is bounded."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.kv_transfer.test_p2p_faults import (
    expect_recomputed,
    left_behind,
    loopback,
    sender_of,
)
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.settings import AllowedPeers
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import Deadline, PeerLost, ask
from vllm.distributed.kv_transfer.kv_connector.v1.p2p_connector import P2pConnector
from vllm.testing.connectors.checks import running

LISTED = [
    "10.0.0.0/8",
    "192.168.1.7:5600-5607",
    "prefill-0.cluster.local:5600",
    "7up.example",
    "[fd00::]/8",
    "[2001:db8::1]:5600",
]


@pytest.mark.parametrize(
    ("host", "ports"),
    [
        ("10.255.0.1", [1, 65535]),
        ("::ffff:10.0.0.1", [80]),
        ("192.168.1.7", [5600, 5607]),
        ("PREFILL-0.cluster.local", [5600]),
        ("7up.example", [80]),
        ("fd12::1", [80]),
        ("2001:db8:0:0::1", [5600]),
    ],
)
def test_allowed(host: str, ports: list[int]) -> None:
    AllowedPeers(LISTED, "127.0.0.1").check(host, ports)


@pytest.mark.parametrize(
    ("host", "ports"),
    [
        ("127.0.0.1", [5600]),  # the list replaces the default
        ("11.0.0.1", [5600]),
        ("192.168.1.7", [5600, 5608]),  # each port counts
        ("192.168.1.8", [5600]),
        ("prefill-0.cluster.local", [22]),
        ("prefill-0.cluster.local.evil.example", [5600]),
        ("prefill-0.cluster.local.", [5600]),
        ("10.1", [5600]),  # what C libraries take for 10.0.0.1
        ("0x0a000001", [5600]),
        ("167772161", [5600]),
        ("10.0.0.1@evil.example", [5600]),
        ("fe80::1%eth0", [5600]),
        ("2001:db8::2", [5600]),
        ("", [5600]),
        ("x\0", [5600]),
    ],
)
def test_refused(host: str, ports: list[int]) -> None:
    with pytest.raises(ValueError, match="remote_host: .* none of the peers .* allowed_peers"):
        AllowedPeers(LISTED, "127.0.0.1").check(host, ports)


NO_ENTRIES = ["", ":5600", "a:", "a:0", "a:9-5", "a:70000", "a b", "http://a", "::1", "[::1", 5]
NO_ENTRIES += ["[10.0.0.1]", "10.0.0.1/8", "10.0.0.256"]


@pytest.mark.parametrize("entry", NO_ENTRIES)
def test_entries_are_checked(entry: Any) -> None:
    with pytest.raises(ValueError, match="is no peer: give HOST"):
        AllowedPeers([entry], "127.0.0.1")


def test_default_is_the_own_host() -> None:
    peers = AllowedPeers(None, "Node-7")
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "node-7"):
        peers.check(host, [1024, 65535])
        with pytest.raises(ValueError):
            peers.check(host, [1023])
    for host in ("10.0.0.1", "169.254.169.254", "0.0.0.0", "node-8", "127.1"):
        with pytest.raises(ValueError, match="remote_host"):
            peers.check(host, [5600])
    AllowedPeers(None, "10.0.0.7").check("10.0.0.7", [5600])
    with pytest.raises(ValueError):
        AllowedPeers([], "127.0.0.1").check("127.0.0.1", [5600])


# ---- a request ----------------------------------------------------------------------------------

PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_ports": [5600],
    "remote_num_tokens": 4,
}


def check(allowed: list[str] | None, **changed: Any) -> None:
    extra = {} if allowed is None else {"allowed_peers": allowed}
    transfer = KVTransferConfig(
        kv_connector="P2pConnector", kv_role="kv_consumer", kv_connector_extra_config=extra
    )
    P2pConnector.check_request(transfer, {**PARAMS, **changed}, 1)


def test_a_request_names_allowed_peers() -> None:
    check(None)
    check(["10.0.0.0/8"], remote_host="10.1.2.3")
    with pytest.raises(ValueError, match="remote_host: '169.254.169.254', port 5600"):
        check(None, remote_host="169.254.169.254")
    with pytest.raises(ValueError, match="remote_host: '127.0.0.1', port 22"):
        check(None, remote_ports=[5600, 22])
    for ports in ([0], [-1], [65536], [True], ["5600"], [5600.0]):
        with pytest.raises(ValueError, match="remote_ports: a list of ports"):
            check(["127.0.0.1"], remote_ports=ports)


# ---- a peer that is none of ours ----------------------------------------------------------------


@contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Accepts one connection; whoever it is gets `answer` and the end."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            try:
                answer(connection)
            except OSError:
                return  # the other side has hung up

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()
    finally:
        server.close()
        thread.join()


def framed(data: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(struct.pack("!I", len(data)) + data)

    return answer


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "a message that cannot be read"),
        (b"\xc1", "a message that cannot be read"),
        (b"\x91" * 200_000, "a message that cannot be read"),  # nested far too deep
        (b"\x81\xa1\xff\x01", "a message that cannot be read"),  # no UTF-8
        (bytes(2000), "a message of 2000 bytes, more than 1000"),
    ],
)
def test_answers_of_others(data: bytes, reason: str) -> None:
    limit = 1000 if len(data) == 2000 else 2**20
    with listener(framed(data)) as address, pytest.raises(PeerLost, match=reason):
        ask(address, {"op": "hello"}, Deadline(30), limit)


def test_a_deadline_holds_for_all_of_an_answer() -> None:
    """A peer that sends a byte now and then is given up in time, not after its last byte."""
    gone = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(struct.pack("!I", 2**20))
        while not gone.wait(0.01):
            connection.sendall(b"x")

    with listener(drip) as address:
        began = time.monotonic()
        try:
            with pytest.raises(PeerLost, match="within 0.3 s|in time"):
                ask(address, {"op": "hello"}, Deadline(0.3))
        finally:
            gone.set()
        assert time.monotonic() - began < 60, "2**20 bytes would take three hours"


@pytest.mark.parametrize("address", [("a" * 70 + ".x", 80), ("127.0.0.1", 70000), ("a\0b", 80)])
def test_what_is_no_address_is_a_lost_peer(address: tuple[str, int]) -> None:
    """Or the thread that extends leases would end with it."""
    with pytest.raises(PeerLost):
        ask(address, {"op": "extend"}, Deadline(5))


def test_an_answer_too_long_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(loopback(), "attention", tmp_path) as engine:
        turn = left_behind(engine)
        sender_of(engine)._identity = {"filler": "x" * (5 * 2**20)}
        expect_recomputed(engine, turn)
    assert "a message of 5" in caplog.text and len(caplog.text) < 10_000


def test_a_consumer_tells_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is at the address learns what the request's parameters say, and what it said
    itself."""
    monkeypatch.setenv("PYTHONHASHSEED", "a secret seed")
    heard: list[dict[str, Any]] = []
    with running(loopback(), "attention", tmp_path) as engine:
        turn = left_behind(engine)
        handlers = engine.worker._server._handlers  # type: ignore[attr-defined]
        for op, handler in list(handlers.items()):

            def hears(c: socket.socket, message: dict[str, Any], handler: Any = handler) -> None:
                heard.append(message)
                handler(c, message)

            handlers[op] = hears
        name = engine.add(turn)
        engine.settle()
        assert engine.requests[name].num_external_computed_tokens
        assert "a secret seed" not in str(sender_of(engine)._identity)
        assert sender_of(engine)._identity["hash_seed"] is not None
    known = {
        "hello": {"op"},
        "describe": {"op", "engine_id", "req_id", "wait_s"},
        "read": {"op", "key", "ranges"},
        "extend": {"op", "req_ids"},
        "done": {"op", "req_id"},
    }
    assert {"hello", "describe", "read"} <= {message["op"] for message in heard}
    assert all(set(message) == known[message["op"]] for message in heard)
