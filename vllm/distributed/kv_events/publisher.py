# SPDX-License-Identifier: Apache-2.0
"""Publishing of event batches over ZMQ, with a second socket that repeats what was missed.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0) and msgpack. A
subscriber that sees a number skipped asks the replay socket for everything from there on.
"""

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar

import msgspec
import zmq

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events.messages import EventBatch
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

logger = init_logger(__name__)

#: how long a shutdown waits for messages on their way
_LINGER_MS = 1000
_SEQUENCE_BYTES = 8


class EventPublisher(ABC):
    """Sends event batches of one data-parallel rank."""

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Send a batch, or drop it; never waits for a subscriber."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what is queued and release everything; safe to call twice."""


class NullEventPublisher(EventPublisher):
    """Drops every batch."""

    def publish(self, events: EventBatch) -> None:
        pass

    def shutdown(self) -> None:
        pass


class ZmqEventPublisher(EventPublisher):
    """A PUB socket at `endpoint` and, if asked for, a ROUTER socket at `replay_endpoint`.

    Rank r uses the TCP port r above the given one. An endpoint with a `*` is bound, as are ipc and
    inproc; any other is connected to. `hwm`: messages queued per subscriber before it loses some;
    `max_queue_size`: batches queued in front of the socket before they are dropped, which leaves
    their numbers out; `buffer_steps`: batches kept for replay. Raises `ValueError` for an endpoint
    that cannot be had.

    A replay request is one frame, the first number wanted, in the form of the second frame above.
    The answer is a message `(number, msgpack)` for each batch still kept and `(-1, empty)` at the
    end, with an empty frame in front if the request had one (as REQ sockets send).
    """

    END_SEQ = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)

    def __init__(
        self,
        data_parallel_rank: int = 0,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
    ) -> None:
        super().__init__(data_parallel_rank)
        self._topic = topic.encode()
        self._next = 0
        self._queue: queue.Queue[tuple[int, EventBatch] | None] = queue.Queue(max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._lock = threading.Lock()
        self._num_dropped = 0
        self._context = zmq.Context()
        try:
            publishing = self._open(zmq.PUB, endpoint, hwm)
            threads = [(self._send, publishing)]
            if replay_endpoint is not None:
                threads.append((self._replay, self._open(zmq.ROUTER, replay_endpoint, 0)))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise VLLMValidationError(
                f"KV events cannot be published at {endpoint} (replay at {replay_endpoint}): "
                f"{error}; choose other endpoints in --kv-events-config"
            ) from None
        self._threads = [
            threading.Thread(target=work, args=(socket,), name="kv-events", daemon=True)
            for work, socket in threads
        ]
        for thread in self._threads:
            thread.start()

    def publish(self, events: EventBatch) -> None:
        events.data_parallel_rank = self._data_parallel_rank
        number, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait((number, events))
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped == 1:
                logger.warning("KV events are dropped: max_queue_size batches wait already")

    def shutdown(self) -> None:
        if self._context.closed:
            return
        self._queue.put(None)
        self._threads[0].join()
        self._context.term()  # ends the replay thread too
        for thread in self._threads:
            thread.join()

    def _open(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        address = offset_endpoint(endpoint, self._data_parallel_rank)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        if "*" in address or address.startswith(("ipc://", "inproc://")):
            socket.bind(address)
        else:
            socket.connect(address)
        return socket

    # ---- threads -------------------------------------------------------------------------------

    def _send(self, socket: zmq.Socket[bytes]) -> None:
        encode = msgspec.msgpack.Encoder().encode
        with socket:
            while (item := self._queue.get()) is not None:
                number, payload = item[0].to_bytes(_SEQUENCE_BYTES, "big"), encode(item[1])
                with self._lock:
                    self._sent.append((number, payload))
                socket.send_multipart((self._topic, number, payload))

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        with socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                *envelope, first = socket.recv_multipart()
                if len(first) == _SEQUENCE_BYTES:
                    with self._lock:
                        kept = [item for item in self._sent if item[0] >= first]
                    for number, payload in kept:
                        socket.send_multipart((*envelope, number, payload))
                else:
                    logger.warning("a replay request of %d bytes; expected 8", len(first))
                socket.send_multipart((*envelope, self.END_SEQ, b""))


def offset_endpoint(endpoint: str, data_parallel_rank: int) -> str:
    """The endpoint of a rank: that many TCP ports further, or with a suffix.

    Raises `ValueError` for a TCP endpoint without a port.
    """
    if data_parallel_rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{data_parallel_rank}"
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise VLLMValidationError(f"endpoint {endpoint!r} has no port")
    return f"{host}:{int(port) + data_parallel_rank}"


class EventPublisherFactory:
    """Publishers by the name `--kv-events-config` gives them."""

    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": ZmqEventPublisher,
    }

    @classmethod
    def register_publisher(cls, name: str, constructor: Callable[..., EventPublisher]) -> None:
        """`constructor` takes the data-parallel rank and the fields of `KVEventsConfig` but the
        first two, by name. Raises `KeyError` for a name that is taken."""
        if name in cls._registry:
            raise KeyError(f"a publisher named {name!r} exists already")
        cls._registry[name] = constructor

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """The configured publisher. Raises `ValueError` for an unknown name."""
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher()
        if config.publisher not in cls._registry:
            raise VLLMValidationError(
                f"publisher {config.publisher!r} in --kv-events-config is unknown; known: "
                f"{', '.join(cls._registry)}"
            )
        settings: dict[str, Any] = asdict(config)
        del settings["enable_kv_cache_events"], settings["publisher"]
        return cls._registry[config.publisher](data_parallel_rank=data_parallel_rank, **settings)
