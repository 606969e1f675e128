# SPDX-License-Identifier: Apache-2.0
"""State transfer between engines passes the connector kit; peers that die, hang or differ."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.kv_transfer import loopback_connector
from tests.distributed.kv_transfer.loopback_connector import LoopbackConnector, damage_peer
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.identity import (
    HandshakeRefused,
    compare,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import RemoteState
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.receiving import Receiver
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging import NoRoom, Staging
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import (
    Deadline,
    MessageServer,
    PeerLost,
    PeerRefused,
    ask,
    send,
)
from vllm.exceptions import VLLMValidationError
from vllm.testing.connectors import CHECKS, DAMAGES, ConnectorCase, check_random_lives
from vllm.testing.connectors.checks import PROMPTS, running
from vllm.testing.connectors.engine import SimulatedEngine, expected_output
from vllm.v1.engine import FinishReason

pytestmark = pytest.mark.slow

KINDS = ("attention", "window", "compressed", "hybrid_rows")


def loopback(**extra: Any) -> ConnectorCase:
    settings = {"host": "127.0.0.1", "port": 0, "staging_bytes": 2**20, "timeout_s": 5.0}
    config = {
        "kv_connector": "LoopbackConnector",
        "kv_connector_module_path": loopback_connector.__name__,
        "kv_connector_extra_config": {**settings, **extra},
    }
    return ConnectorCase(config, KINDS, damage_peer, loads=False)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_the_kit(kind: str, tmp_path: Path) -> None:
    for check, run in CHECKS.items():
        if kind != "hybrid_rows" and check not in ("exact-bits", "random-lives"):
            continue
        if run is check_random_lives:
            check_random_lives(loopback(), kind, tmp_path / check, runs=4, seed=40)
        else:
            run(loopback(), kind, tmp_path / check)


def test_passes_the_kit_on_two_ranks(tmp_path: Path) -> None:
    """Each rank fetches its part from the peer's worker of that rank; one's may be damaged."""
    case = replace(loopback(), num_workers=2)
    for check in ("exact-bits", "recompute", "shutdown"):
        CHECKS[check](case, "hybrid_rows", tmp_path / check)
    check_random_lives(case, "hybrid_rows", tmp_path, runs=2, seed=60)


# ---- the next turn of a conversation, whose state a peer has ------------------------------------


def left_behind(engine: SimulatedEngine) -> list[int]:
    """Run a prompt whose state a peer keeps; the prompt of the next turn."""
    [output] = engine.generate(PROMPTS[0])
    engine.evict_device()
    return [*PROMPTS[0], *engine.tokens[output.request_id], 9, 8, 7]


def sender_of(engine: SimulatedEngine) -> Any:
    assert isinstance(engine.worker, LoopbackConnector)
    return engine.worker._sender


def expect_recomputed(engine: SimulatedEngine, turn: list[int]) -> None:
    name = engine.add(turn)
    engine.settle()
    assert engine.tokens[name] == expected_output(turn, 4)
    assert engine.requests[name].num_cached_tokens <= 0, "nothing of it came"


def test_all_of_it_comes(tmp_path: Path) -> None:
    with running(loopback(), "hybrid_rows", tmp_path) as engine:
        turn = left_behind(engine)
        name = engine.add(turn)
        engine.settle()
        assert engine.tokens[name] == expected_output(turn, 4)
        assert engine.requests[name].num_external_computed_tokens == len(PROMPTS[0]) + 3


def test_a_step_that_waits_ends_with_the_transfer(tmp_path: Path) -> None:
    """What has come, and what was staged, is reported by the step that waited for it."""
    with running(loopback(timeout_s=60.0), "attention", tmp_path) as engine:
        name = engine.add(left_behind(engine))
        transfer, began = engine.scheduler.transfer, time.monotonic()
        assert transfer is not None
        for waited_for in (transfer.loading, transfer.sending):
            while not waited_for:
                engine.step()
            while waited_for:
                engine.step()  # it begins in a step, and is reported by one
                if waited_for:
                    engine.worker.wait_for_transfers(60)
        assert engine.requests[name].num_external_computed_tokens
        assert time.monotonic() - began < 50, "nobody waited for the limit"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_damage_is_noticed(damage: str, policy: str, tmp_path: Path) -> None:
    case = loopback(timeout_s=120.0)
    with running(case, "hybrid_rows", tmp_path, policy=policy) as engine:
        turn = left_behind(engine)
        assert engine.damage(case, damage)
        began = time.monotonic()
        if policy == "recompute":
            expect_recomputed(engine, turn)
        else:
            name = engine.add(turn)
            engine.settle()
            assert engine.reason(name) is FinishReason.ERROR
        assert time.monotonic() - began < 60, "not the timeout: the peer said so"
        [output] = engine.generate(PROMPTS[1])
        assert output.finish_reason is FinishReason.LENGTH, "the others go on"


@pytest.mark.parametrize("op", ["hello", "describe", "read"])
@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_peer_that_goes_away(op: str, how: str, tmp_path: Path) -> None:
    """In every message of a transfer: a dead one is noticed at once, a hung one in time."""
    released = threading.Event()
    timeout_s = 0.5 if how == "hangs" else 60.0
    with running(loopback(timeout_s=timeout_s), "hybrid_rows", tmp_path) as engine:
        turn = left_behind(engine)

        def gone(connection: socket.socket, message: dict[str, Any]) -> None:
            if op == "read":
                connection.sendall(bytes(100))  # the beginning came
            if how == "hangs":
                released.wait(30)
            connection.shutdown(socket.SHUT_RDWR)

        engine.worker._server._handlers[op] = gone  # type: ignore[attr-defined]
        try:
            expect_recomputed(engine, turn)  # or the kit ends the wait
        finally:
            released.set()


@pytest.mark.parametrize(
    "lie", [{"offset": 2**40}, {"offset": "x"}, {"blocks": 5}, {"lease_s": -1}]
)
def test_a_peer_that_says_nonsense(
    lie: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs the request, at once, and nobody else."""
    with running(loopback(timeout_s=60.0), "attention", tmp_path) as engine:
        turn = left_behind(engine)
        [held] = sender_of(engine)._held.values()
        if "lease_s" in lie:
            sender_of(engine)._lease_s = -1.0
        held.description.update(lie)
        name = engine.add(turn)
        engine.settle()  # or the kit ends the wait
        assert engine.tokens[name] == expected_output(turn, 4)
        assert engine.worker._receiver._beat_s > 0  # type: ignore[attr-defined]
    assert "Traceback" not in caplog.text
    _expect_text_only(caplog)


def test_a_lease_ends_unless_it_is_extended(tmp_path: Path) -> None:
    with running(loopback(kv_lease_duration=50), "attention", tmp_path) as engine:
        left_behind(engine)
        sender, port = sender_of(engine), engine.worker._server.port  # type: ignore[attr-defined]
        [(req_id, held)] = sender._held.items()
        held.deadline = ends = time.monotonic() + 20
        ask(("127.0.0.1", port), {"op": "extend", "req_ids": [req_id, "x"]}, Deadline(60))
        assert held.deadline > ends + 20
        with sender._changed:
            held.deadline = time.monotonic()
            sender._changed.notify_all()
        question = {"op": "describe", "engine_id": sender._engine_id, "req_id": req_id}
        while sender._held:
            time.sleep(0.001)
        with pytest.raises(PeerRefused, match="its lease of 50 s ended"):
            ask(("127.0.0.1", port), {**question, "wait_s": 30}, Deadline(60))
        assert not sender._staging.used_bytes and sender.take_stats().data["expired_leases"] == 1


def test_what_waits_is_kept(tmp_path: Path) -> None:
    """A consumer extends leases from when a request is queued to when it has its state."""
    with running(loopback(), "attention", tmp_path) as engine:
        turn = left_behind(engine)
        extended = threading.Event()
        handlers = engine.worker._server._handlers  # type: ignore[attr-defined]
        describe, extend = handlers["describe"], handlers["extend"]

        def late(connection: socket.socket, message: dict[str, Any]) -> None:
            assert extended.wait(60)
            describe(connection, message)

        def heard(connection: socket.socket, message: dict[str, Any]) -> None:
            extended.set()
            extend(connection, message)

        handlers["describe"], handlers["extend"] = late, heard
        name = engine.add(turn)
        engine.settle()
        assert engine.requests[name].num_external_computed_tokens and extended.is_set()


def test_another_engine_at_the_address_is_refused(tmp_path: Path) -> None:
    with running(loopback(), "attention", tmp_path) as engine:
        port = engine.worker._server.port  # type: ignore[attr-defined]
        question = {"op": "describe", "engine_id": "before", "req_id": "r1", "wait_s": 9}
        with pytest.raises(PeerRefused, match="not before"):
            ask(("127.0.0.1", port), question, Deadline(60))
        with pytest.raises(PeerRefused, match="unknown op 'x'"):
            ask(("127.0.0.1", port), {"op": "x"}, Deadline(60))
        with pytest.raises(PeerRefused, match="the key is not"):
            ask(("127.0.0.1", port), {"op": "read", "key": b"0", "ranges": []}, Deadline(60))


# ---- the handshake ------------------------------------------------------------------------------

IDENTITY: dict[str, Any] = {
    "protocol": 1,
    "engine_version": "1.0",
    "dtype": "float32",
    "hash_seed": None,
    "state_groups": [{"spec": "A", "block_bytes": 4, "layer_offsets": [0, 2]}],
}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"protocol": 2}, "protocol is 1 here and 2 there"),
        ({"engine_version": "2.0"}, "engine_version is '1.0' here and '2.0' there"),
        ({"dtype": "bfloat16"}, "dtype is 'float32' here and 'bfloat16' there"),
        ({"hash_seed": "0"}, "hash_seed is None here and '0' there"),
        (
            {"state_groups": [{"spec": "A", "block_bytes": 4, "layer_offsets": [0, 3]}]},
            r"state_groups\[0\].layer_offsets\[1\] is 2 here and 3 there",
        ),
        ({"state_groups": []}, "state_groups is .* here and \\[\\] there"),
        ({"more": 1}, "more is None here and 1 there"),
    ],
)
def test_the_handshake_names_what_differs(changed: dict[str, Any], field: str) -> None:
    compare(IDENTITY, {**IDENTITY}, "peer")
    with pytest.raises(HandshakeRefused, match=f"^peer keeps other state.*: {field}"):
        compare(IDENTITY, {**IDENTITY, **changed}, "peer")


@pytest.mark.parametrize("what", ["dtype", "staging", "ranks"])
def test_a_peer_that_differs_is_refused(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    differing = {"dtype": {"dtype": "float16"}, "staging": {"staging_device": "cuda"}}
    with running(loopback(), "attention", tmp_path) as engine:
        turn = left_behind(engine)
        if what in differing:
            sender_of(engine)._identity = sender_of(engine)._identity | differing[what]
        else:
            [params] = engine.connector.stored.values()  # type: ignore[attr-defined]
            params["remote_ports"] = params["remote_ports"] * 2
        expect_recomputed(engine, turn)
    named = {
        "dtype": "dtype is 'torch.float32'",
        "staging": "staging_device is 'cpu'",
        "ranks": "tensor_parallel_size is 1",
    }
    assert f"{named[what]} here and" in caplog.text
    _expect_text_only(caplog)


# ---- parts --------------------------------------------------------------------------------------


def test_staging_waits_for_room_and_gives_up() -> None:
    staging = Staging(1024, pinned=False)
    first, second = (staging.allocate(500, 1.0) for _ in range(2))
    with pytest.raises(NoRoom, match=r"300 bytes of staging memory .*: none was given back for"):
        staging.allocate(300, 0.05)
    with pytest.raises(NoRoom, match="raise staging_bytes"):
        staging.allocate(1025, 60.0)
    threading.Timer(0.05, staging.free, [first]).start()
    assert staging.allocate(300, 60.0) == first
    staging.free(first)
    staging.free(second)
    assert staging.used_bytes == 0 and staging.allocate(1024, 1.0) == 0


def test_staging_is_given_out_in_turn() -> None:
    """Small segments do not pass a large one for ever."""
    staging = Staging(1024)
    got: list[str] = []

    def take(name: str, size: int) -> None:
        offset = staging.allocate(size, 60.0)
        got.append(name)
        staging.free(offset)

    halves = [staging.allocate(512, 1.0) for _ in range(2)]
    threads = []
    for name, size in (("large", 1024), ("small", 256)):
        threads.append(threading.Thread(target=take, args=(name, size)))
        threads[-1].start()
        while len(staging._queue) < len(threads):
            time.sleep(0.001)
    for half in halves:
        staging.free(half)
    for thread in threads:
        thread.join(60)
    assert got == ["large", "small"]


def test_a_message_cut_off_is_no_answer() -> None:
    def half(connection: socket.socket, message: dict[str, Any]) -> None:
        connection.sendall(b"\0\0\0\x09abc")
        connection.shutdown(socket.SHUT_RDWR)

    server = MessageServer("127.0.0.1", 0, {"half": half, "whole": lambda c, m: send(c, {"a": 1})})
    try:
        assert ask(("127.0.0.1", server.port), {"op": "whole"}, Deadline(60)) == {"a": 1}
        with pytest.raises(PeerLost, match="in the middle"):
            ask(("127.0.0.1", server.port), {"op": "half"}, Deadline(60))
    finally:
        server.close()
    with pytest.raises(PeerLost):
        ask(("127.0.0.1", server.port), {"op": "whole"}, Deadline(60))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"porte": 1}, "porte.*kv_connector_extra_config knows host, port"),
        ({"port": 70000}, "port 70000"),
        ({"timeout_s": 0}, "timeout_s 0: give a positive number"),
        ({"host": ""}, "host ''"),
        ({"backends": ["UCX"]}, "backends"),
        ({"allowed_peers": "10.0.0.0/8"}, "allowed_peers '10.0.0.0/8': give a list"),
        ({"allowed_peers": ["10.0.0.1/8"]}, "'10.0.0.1/8' is no peer"),
    ],
)
def test_settings_are_checked(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        SimulatedEngine(loopback(**extra), "attention", tmp_path)


def test_an_engine_ends_while_it_extends_a_lease() -> None:
    """The end is not missed by the thread that is talking to a peer when it comes."""
    asked, go_on = threading.Event(), threading.Event()

    def extend(connection: socket.socket, message: dict[str, Any]) -> None:
        asked.set()
        go_on.wait(60)
        send(connection, {})

    server = MessageServer("127.0.0.1", 0, {"extend": extend})
    copies: Any = None
    transport: Any = None
    receiver = Receiver(copies, Staging(4096, False), transport, {}, 0, 1, 5.0, lambda: None)
    receiver.expect(RemoteState("engine", "r", "127.0.0.1", (server.port,), 1))
    assert asked.wait(60)
    with receiver._changed:
        receiver._expected.clear()
    closing = threading.Thread(target=receiver.close, daemon=True)
    closing.start()
    while not receiver._closed:
        time.sleep(0.001)
    go_on.set()
    closing.join(30)
    assert not closing.is_alive()
    server.close()


def _expect_text_only(caplog: pytest.LogCaptureFixture) -> None:
    """Who keeps records keeps no error, whose trace would keep the transport open."""
    given = [argument for record in caplog.records for argument in record.args or ()]
    assert not [argument for argument in given if isinstance(argument, BaseException)]
