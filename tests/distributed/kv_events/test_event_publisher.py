# SPDX-License-Identifier: Apache-2.0
"""Sockets of the publisher: frames, order, replay, what happens when it is too slow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from subscriber import END, TIMEOUT_MS, Subscriber

from tests.ports import free_port
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    EventBatch,
    EventPublisherFactory,
    KVEventBatch,
    NullEventPublisher,
    ZmqEventPublisher,
)
from vllm.distributed.kv_events.publisher import offset_endpoint
from vllm.exceptions import VLLMValidationError


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """`make(**settings) -> (publisher, subscriber)`, connected."""
    opened: list[Any] = []

    def build(**settings: Any) -> tuple[ZmqEventPublisher, Subscriber]:
        endpoints = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
        config = KVEventsConfig(True, None, *endpoints, **settings)
        publisher = EventPublisherFactory.create(config)
        assert isinstance(publisher, ZmqEventPublisher)
        opened.append(publisher.shutdown)
        subscriber = Subscriber(*endpoints, topic=settings.get("topic", ""))
        opened.append(subscriber.close)
        return publisher, subscriber

    yield build
    for close in reversed(opened):
        close()


def publish(publisher: ZmqEventPublisher, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        publisher.publish(EventBatch(float(number), [BlockRemoved([number], "GPU", 0)]))


def connect(publisher: ZmqEventPublisher, subscriber: Subscriber) -> int:
    """Publish until the subscriber hears it; the next number."""
    number = 0
    while True:
        publish(publisher, 1)
        number += 1
        if (message := subscriber.receive(50)) is not None:
            break
    while message is not None and message[0] < number - 1:
        message = subscriber.receive()
    return number


def test_frames_in_order(make: Any) -> None:
    publisher, subscriber = make(topic="kv")
    first = connect(publisher, subscriber)
    publish(publisher, 20, first)
    for number in range(first, first + 20):
        message = subscriber.receive()
        assert message is not None and message[0] == number
        batch = msgspec.msgpack.decode(message[1], type=KVEventBatch)
        assert batch == KVEventBatch(float(number), [BlockRemoved([number], "GPU", 0)], 0)
        name, hashes, *_ = msgspec.msgpack.decode(message[1])[1][0]
        assert (name, hashes) == ("BlockRemoved", [number])


def test_replay_starts_where_asked_and_ends_with_a_mark(make: Any) -> None:
    publisher, subscriber = make(buffer_steps=8)
    first = connect(publisher, subscriber)
    publish(publisher, 20, first)
    while (message := subscriber.receive()) is not None and message[0] < first + 19:
        pass
    kept = [number for number, _ in subscriber.replay(0)]
    assert kept == list(range(first + 12, first + 20))
    assert [number for number, _ in subscriber.replay(first + 17)] == kept[5:]
    assert subscriber.replay(first + 20) == []


def test_replay_for_sockets_without_an_empty_frame_and_bad_requests(
    make: Any, tmp_path: Path
) -> None:
    publisher, subscriber = make()
    first = connect(publisher, subscriber)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(f"ipc://{tmp_path}/replay")
        for request, numbers in ((b"\0" * 8, [*range(first), END]), (b"\0", [END])):
            socket.send(request)
            for number in numbers:
                assert socket.poll(TIMEOUT_MS)
                found, _ = socket.recv_multipart()
                assert int.from_bytes(found, "big", signed=True) == number
    context.destroy(linger=0)


def test_a_full_queue_drops_and_leaves_a_gap(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, waiting = threading.Event(), threading.Event()
    send = ZmqEventPublisher._send

    def late(self: ZmqEventPublisher, socket: Any) -> None:
        waiting.set()
        gate.wait(60)
        send(self, socket)

    monkeypatch.setattr(ZmqEventPublisher, "_send", late)
    publisher, subscriber = make(max_queue_size=3)
    assert waiting.wait(60)
    publish(publisher, 5)
    gate.set()
    while len(subscriber.replay(0)) < 3:
        pass
    publish(publisher, 1)
    while len(kept := subscriber.replay(0)) < 4:
        pass
    assert [number for number, _ in kept] == [0, 1, 2, 5]


def test_shutdown_sends_what_is_queued_and_happens_once(make: Any) -> None:
    publisher, subscriber = make()
    first = connect(publisher, subscriber)
    publish(publisher, 500, first)
    publisher.shutdown()
    publisher.shutdown()
    numbers = [subscriber.receive() for _ in range(500)]
    assert [message[0] for message in numbers if message] == list(range(first, first + 500))


def test_an_address_in_use_is_named() -> None:
    endpoint = f"tcp://*:{free_port()}"
    publisher = ZmqEventPublisher(endpoint=endpoint)
    with pytest.raises(
        VLLMValidationError, match="cannot be published at tcp.*in use.*kv-events-config"
    ):
        ZmqEventPublisher(endpoint=endpoint)
    publisher.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", "tcp://*:5560"),
        ("tcp://[::]:80", "tcp://[::]:83"),
        ("ipc:///run/events", "ipc:///run/events_dp3"),
        ("inproc://events", "inproc://events_dp3"),
    ],
)
def test_ranks_have_their_own_endpoints(endpoint: str, expected: str) -> None:
    assert offset_endpoint(endpoint, 0) == endpoint
    assert offset_endpoint(endpoint, 3) == expected
    with pytest.raises(VLLMValidationError, match="no port"):
        offset_endpoint("tcp://host", 1)


def test_the_factory() -> None:
    assert isinstance(EventPublisherFactory.create(None), NullEventPublisher)
    off = KVEventsConfig(publisher="zmq")
    assert isinstance(EventPublisherFactory.create(off), NullEventPublisher)
    assert KVEventsConfig().publisher == "null"
    unknown = KVEventsConfig(enable_kv_cache_events=True, publisher="carrier pigeon")
    with pytest.raises(VLLMValidationError, match="'carrier pigeon'.*unknown; known: null, zmq"):
        EventPublisherFactory.create(unknown)
    with pytest.raises(KeyError):
        EventPublisherFactory.register_publisher("zmq", NullEventPublisher)


def test_registered_publishers_get_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EventBatch] = []

    class Mine(NullEventPublisher):
        def __init__(self, data_parallel_rank: int, topic: str, **settings: Any) -> None:
            super().__init__(data_parallel_rank)
            assert (data_parallel_rank, topic, settings["buffer_steps"]) == (2, "t", 7)

        def publish(self, events: EventBatch) -> None:
            seen.append(events)

    monkeypatch.setattr(EventPublisherFactory, "_registry", dict(EventPublisherFactory._registry))
    EventPublisherFactory.register_publisher("mine", Mine)
    config = KVEventsConfig(True, "mine", topic="t", buffer_steps=7)
    EventPublisherFactory.create(config, 2).publish(EventBatch(0.0, [AllBlocksCleared()]))
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["buffer_steps", "hwm", "max_queue_size"])
def test_bad_sizes(name: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"{name}: input should be greater"):
        KVEventsConfig(**{name: -1})
