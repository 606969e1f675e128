# SPDX-License-Identifier: Apache-2.0
"""One consumer's worker and several producers: a peer that hangs or goes away, or memory that is
short, is felt by no request but its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.kv_transfer.fault_runs import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.p2p import receiving
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.copies import BlockCopies, segment_bytes
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.lanes import Lanes
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import (
    Place,
    Places,
    ReceiveJob,
    RemoteState,
    SendJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.receiving import Receiver
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.sending import Sender
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.staging import Staging
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.tcp_transport import TcpTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import (
    Address,
    Deadline,
    MessageServer,
    PeerLost,
    ask,
)
from vllm.testing.connectors.layouts import LAYOUTS, make_config
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import ArenaPlan

BLOCKS = 4
PLACES: Places = [[Place(nth, 1 + nth) for nth in range(BLOCKS)]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ArenaPlan:
    directory: Path = tmp_path_factory.mktemp("model")
    groups = get_kv_cache_groups(make_config("attention", directory), LAYOUTS["attention"])
    return plan_arena(groups, num_pages=64)


def arena_of(plan: ArenaPlan) -> Tensor:
    return torch.zeros(plan.num_pages * plan.page_bytes, dtype=torch.uint8)


class Producer:
    """An engine's worker that keeps states; each is full of its own byte."""

    def __init__(self, plan: ArenaPlan, name: str) -> None:
        self.plan, self.name = plan, name
        self.arena = arena_of(plan)
        self.staging = Staging(16 * segment_bytes(plan, PLACES))
        transport = TcpTransport()
        transport.register(self.staging.buffer, None)
        copies = BlockCopies(self.arena, plan)
        self.told = threading.Event()
        self.sender = Sender(copies, self.staging, transport, name, {}, 300.0, self.told.set)
        self.server = MessageServer("127.0.0.1", 0, self.sender.handlers())
        self._released = threading.Event()
        self.hung = 0

    def keeps(self, number: int) -> RemoteState:
        """The state of its request `number`."""
        req_id = f"{self.name}-{number}"
        self.arena.fill_(number)
        self.sender.stage(SendJob(req_id, 8, 1, PLACES))
        assert self.told.wait(60) and self.sender.take_staged() == {req_id}
        self.told.clear()
        return RemoteState(self.name, req_id, "127.0.0.1", (self.server.port,), 8)

    def hang(self, op: str) -> None:
        """From here on this message is not answered before `release`."""
        answer = self.server._handlers[op]

        def wait(connection: socket.socket, message: dict[str, Any]) -> None:
            self.hung += 1
            self._released.wait(120)
            answer(connection, message)

        self.server._handlers[op] = wait  # type: ignore[index]

    def release(self) -> None:
        self._released.set()

    def close(self) -> None:
        self.release()
        self.sender.close()
        self.server.close()


class CountingTransport(TcpTransport):
    """Notes whom it was told to forget, and how many read at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.reading: list[str] = []
        self.forgotten: list[tuple[str, int]] = []
        self.met: list[str] = []

    def connect(self, address: Address, description: bytes) -> str:
        self.met.append(f"{address[0]}:{address[1]}")
        return super().connect(address, description)

    def read(self, peer: str, ranges: Any, deadline: Any) -> None:
        self.reading.append(peer)
        try:
            super().read(peer, ranges, deadline)
        finally:
            self.reading.remove(peer)

    def disconnect(self, peer: str) -> None:
        self.forgotten.append((peer, self.reading.count(peer)))
        super().disconnect(peer)


class Consumer:
    """The worker under test; `room`: how many states its staging memory holds."""

    def __init__(self, plan: ArenaPlan, room: int = 16, timeout_s: float = 60.0) -> None:
        self.plan, self.arena = plan, arena_of(plan)
        self.staging = Staging(room * segment_bytes(plan, PLACES))
        self.transport = CountingTransport()
        self.transport.register(None, self.staging.buffer)
        self.told = threading.Event()
        copies = BlockCopies(self.arena, plan)
        self.receiver = Receiver(
            copies, self.staging, self.transport, {}, 0, 1, timeout_s, self.told.set
        )
        self.ended: dict[str, bool] = {}
        self._first_blocks: dict[str, int] = {}

    def fetch(self, remote: RemoteState, num_blocks: int = BLOCKS) -> None:
        first = 1 + BLOCKS * len(self._first_blocks)
        self._first_blocks[remote.req_id] = first
        places = [[Place(nth, first + nth) for nth in range(num_blocks)]]
        self.receiver.receive(ReceiveJob(remote.req_id, remote, 1, places))

    def has(self, remote: RemoteState) -> bool:
        """Whether its fetch ended, whatever its end."""
        self.ended.update(self.receiver.take_received())
        return remote.req_id in self.ended

    def content(self, remote: RemoteState) -> set[int]:
        """The bytes in the blocks of a state."""
        first, stride = self._first_blocks[remote.req_id], self.plan.block_stride(0)
        blocks = self.arena[first * stride : (first + BLOCKS) * stride].view(BLOCKS, stride)
        return set(blocks[:, : self.plan.groups[0].block_bytes].unique().tolist())

    def expect(self, remote: RemoteState, number: int) -> None:
        """It comes, and is the right one."""
        wait_until(lambda: self.has(remote))
        assert self.ended[remote.req_id] and self.content(remote) == {number}


@contextmanager
def engines(plan: ArenaPlan, **options: Any) -> Iterator[tuple[Producer, Producer, Consumer]]:
    with ExitStack() as stack:
        consumer = Consumer(plan, **options)
        stack.callback(consumer.receiver.close)
        producers = [Producer(plan, name) for name in ("a", "b")]
        for producer in producers:
            stack.callback(producer.close)
        yield producers[0], producers[1], consumer


@pytest.mark.parametrize("op", ["hello", "describe", "read", "done"])
def test_a_peer_that_hangs_keeps_no_other_waiting(op: str, plan: ArenaPlan) -> None:
    """However many requests it has: they wait for it, and those of the other peer do not."""
    with engines(plan) as (hung, well, consumer):
        lost = [hung.keeps(number) for number in range(1, 7)]
        found = [well.keeps(number) for number in range(7, 10)]
        hung.hang(op)
        for remote in lost:
            consumer.fetch(remote)
        wait_until(lambda: hung.hung)
        for remote, number in zip(found, range(7, 10), strict=True):
            consumer.fetch(remote)
            consumer.expect(remote, number)
        if op != "done":  # what has come is not undone by a word that nobody answers
            assert not any(consumer.has(remote) for remote in lost)
        hung.release()
        for remote, number in zip(lost, range(1, 7), strict=True):
            consumer.expect(remote, number)


def test_leases_of_others_are_extended_beside_a_peer_that_hangs(
    plan: ArenaPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "_WORD_TIMEOUT_S", 50.0)
    with engines(plan) as (hung, well, consumer):
        told = threading.Event()
        extend = well.server._handlers["extend"]

        def hear(connection: socket.socket, message: dict[str, Any]) -> None:
            extend(connection, message)
            told.set()

        well.server._handlers["extend"] = hear  # type: ignore[index]
        hung.hang("extend")
        consumer.receiver.expect(hung.keeps(1))
        wait_until(lambda: hung.hung)
        consumer.receiver.expect(well.keeps(2))
        assert told.wait(40) and hung.hung == 1
        hung.release()
        wait_until(lambda: hung.hung > 1)  # it is told again once it answers


def test_the_end_of_a_fetch_is_told_when_there_is_a_report(plan: ArenaPlan) -> None:
    with engines(plan) as (peer, _, consumer):
        found, refused = peer.keeps(1), replace(peer.keeps(2), num_tokens=9)
        for remote, arrived in ((found, True), (refused, False)):
            assert not consumer.told.is_set()
            consumer.fetch(remote)
            assert consumer.told.wait(60)
            assert consumer.receiver.take_received() == {remote.req_id: arrived}
            consumer.told.clear()


@pytest.mark.parametrize("when", ["before", "during"])
def test_what_is_given_up_before_it_was_staged_takes_no_memory(when: str, plan: ArenaPlan) -> None:
    """A consumer that has all of the prompt says so as soon as it hears of it; the state would be
    kept for a whole lease."""
    with engines(plan) as (peer, _, _):
        sealer = peer.sender._sealer
        digests = sealer.digests

        def give_up() -> None:
            address = ("127.0.0.1", peer.server.port)
            ask(address, {"op": "done", "req_id": f"{peer.name}-1"}, Deadline(60))

        def slow(segment: Tensor, spans: list[tuple[int, int]]) -> list[int]:
            give_up()
            return digests(segment, spans)

        if when == "before":
            give_up()
        else:
            sealer.digests = slow  # type: ignore[assignment]
        peer.keeps(1)
        assert not peer.sender._held and not peer.staging.used_bytes
        assert not peer.sender.take_stats().data.get("failed_sends")


def test_memory_that_is_short_is_waited_for(plan: ArenaPlan) -> None:
    """A hung peer's request has it all until it is given up. Then its other requests do not try the
    peer in vain, and the wait is no time in which the other peer did not answer."""
    with engines(plan, room=1, timeout_s=3.0) as (hung, well, consumer):
        first, second, third = hung.keeps(1), hung.keeps(2), well.keeps(3)
        hung.hang("read")
        consumer.fetch(first)
        wait_until(lambda: hung.hung)
        consumer.fetch(second)
        wait_until(lambda: consumer.staging._queue)
        consumer.fetch(third)
        consumer.expect(third, 3)
        wait_until(lambda: consumer.has(second))
        assert consumer.ended == {first.req_id: False, second.req_id: False, third.req_id: True}
        assert len(consumer.transport.forgotten) == 1 and hung.hung == 1


def test_memory_that_will_not_do_costs_one_request(
    plan: ArenaPlan, caplog: pytest.LogCaptureFixture
) -> None:
    """A state larger than all of it, while the same peer's other one is read."""
    with engines(plan, room=1) as (peer, _, consumer):
        consumer.staging = consumer.receiver._staging = Staging(segment_bytes(plan, PLACES) // 2)
        consumer.transport.register(None, consumer.staging.buffer)
        small, large = peer.keeps(1), peer.keeps(2)
        peer.hang("read")
        consumer.fetch(small, num_blocks=1)
        wait_until(lambda: peer.hung)
        consumer.fetch(large)
        wait_until(lambda: consumer.has(large))
        peer.release()
        wait_until(lambda: consumer.has(small))
        assert consumer.ended == {large.req_id: False, small.req_id: True}
        assert not consumer.transport.forgotten
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"request {large.req_id}" in record.getMessage()
    assert "of staging memory (4096 in all): raise staging_bytes" in record.getMessage()


def test_a_lost_peer_is_forgotten_when_nobody_reads_from_it(plan: ArenaPlan) -> None:
    """One connection breaks while another request reads; that one goes on."""
    with engines(plan) as (peer, _, consumer):
        reading, broken, later = peer.keeps(1), peer.keeps(2), peer.keeps(3)
        describe = peer.server._handlers["describe"]

        def cut(connection: socket.socket, message: dict[str, Any]) -> None:
            if message["req_id"] == broken.req_id:
                connection.shutdown(socket.SHUT_RDWR)
            else:
                describe(connection, message)

        peer.server._handlers["describe"] = cut  # type: ignore[index]
        peer.hang("read")
        consumer.fetch(reading)
        wait_until(lambda: peer.hung)
        consumer.fetch(broken)
        wait_until(lambda: consumer.has(broken))
        assert not consumer.ended[broken.req_id] and not consumer.transport.forgotten
        peer.release()
        consumer.expect(reading, 1)
        wait_until(lambda: consumer.transport.forgotten)
        assert [readers for _, readers in consumer.transport.forgotten] == [0]
        consumer.fetch(later)
        consumer.expect(later, 3)
        assert len(consumer.transport.met) == 2, "it was greeted anew"


def test_a_peer_is_waited_for_from_its_last_answer() -> None:
    """Requests that queue behind others of a peer that serves them have all their time left."""
    lanes = Lanes("test", width=1)
    began, go_on = threading.Event(), threading.Event()
    since: dict[str, float] = {}

    def first(moment: float) -> None:
        began.set()
        assert go_on.wait(60)
        since["progress"] = time.monotonic()
        lanes.note_progress("peer")

    lanes.submit("peer", first)
    assert began.wait(60)
    lanes.submit("peer", lambda moment: since.update(second=moment))
    lanes.submit("other", lambda moment: since.update(other=moment))
    wait_until(lambda: "other" in since)
    go_on.set()
    wait_until(lambda: "second" in since)
    assert since["other"] < since["progress"] <= since["second"]
    assert Deadline(100.0, since["other"]).left("x") < 100.0
    ended = Deadline(1.0, time.monotonic() - 2)
    with pytest.raises(PeerLost, match="no answer within 1 s"):
        ended.left("x")
    ended.postpone(60)
    assert ended.left("x") > 1
    lanes.close()
    lanes.submit("peer", lambda moment: since.clear())
    assert since and not lanes._lanes


def test_digests_are_counted(plan: ArenaPlan) -> None:
    """Bytes and time on both sides, and what came with another one."""
    size = segment_bytes(plan, PLACES)
    with engines(plan) as (peer, _, consumer):
        good, bad = peer.keeps(1), peer.keeps(2)
        sealed = peer.sender.take_stats().data
        assert sealed["seal_bytes"] == 2 * size and sealed["seal_seconds"] > 0
        peer.staging.buffer[peer.sender._held[bad.req_id].offset] ^= 1
        for remote in (good, bad):
            consumer.fetch(remote)
            wait_until(partial(consumer.has, remote))
        assert consumer.ended == {good.req_id: True, bad.req_id: False}
        counted = consumer.receiver.take_stats().data
        assert counted["seal_bytes"] == 2 * size and counted["seal_seconds"] > 0
        assert counted["broken_seals"] == counted["failed_receives"] == 1
        assert counted["received_requests"] == 1
        parts = [counted[f"{part}_seconds"] for part in ("wait", "read")]
        assert all(seconds > 0 for seconds in parts)


def test_state_of_other_weights_is_refused(
    plan: ArenaPlan, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by a consumer that has greeted its producer before one of them changed."""
    with engines(plan) as (peer, _, consumer):
        first, second = peer.keeps(1), peer.keeps(2)
        consumer.fetch(first)
        consumer.expect(first, 1)
        consumer.receiver.reset(["new"])
        consumer.fetch(second)
        wait_until(lambda: consumer.has(second))
        assert not consumer.ended[second.req_id] and not consumer.transport.forgotten
        assert "weights is ['new'] here and None there" in caplog.text
        peer.sender.reset(["new"])
        assert not peer.sender._held
        third = peer.keeps(3)
        consumer.fetch(third)
        consumer.expect(third, 3)
        assert len(consumer.transport.met) == 1
