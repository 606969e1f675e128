# SPDX-License-Identifier: Apache-2.0
"""A host of an engine other than the first: it has workers, and passes on what the first one says.

It ends when the first one says so or is gone, and the first one notices when it ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import selectors
import time

from vllm.config import VllmConfig
from vllm.distributed.rendezvous import connect
from vllm.logger import init_logger
from vllm.utils.silence import BEAT_S
from vllm.v1.executor.device_checks import check_devices, device_names
from vllm.v1.executor.local_workers import LocalWorkers
from vllm.v1.executor.message_socket import MessageSocket, interface_of
from vllm.v1.executor.node_agreement import agreement
from vllm.v1.executor.node_messages import TOLD_TO_STOP, Hello, NodeSetup, Tag
from vllm.v1.executor.station import WorkerDiedError, failure_of
from vllm.v1.executor.stationed import LAST_WORDS_S, STOP_S

logger = init_logger(__name__)

#: the first host gives up first, and says why
_PATIENCE_S = 60
#: the first host answers the end of a worker with the end of all
_VERDICT_S = 10.0


class NodeEndedError(RuntimeError):
    """The engine has ended otherwise than by being stopped."""


class NodeRefusedError(RuntimeError):
    """The first host does not start an engine with this one."""


def run_node(config: VllmConfig) -> None:
    """Join the first host and run this one's workers until the engine is stopped.

    Raises `VLLMValidationError` for devices that do not suit, `StartTimeoutError` if the first host
    does not answer, `NodeRefusedError` if it does not start, `NodeEndedError` when the engine
    fails.
    """
    check_devices(config)
    parallel = config.parallel_config
    place = f"node 0 at {parallel.master_addr}:{parallel.master_port}"
    timeout_s = parallel.hosts_timeout_s
    hello = Hello(parallel.node_rank, agreement(config), device_names(config))
    connection = _connect(config, place, timeout_s)
    try:
        setup = _join(hello, connection, place, timeout_s)
        interface = interface_of(connection.own_address)
        workers = LocalWorkers(setup.plan, setup.ranks, interface, (connection,))
        node = _Node(connection, workers, place)
        logger.info("node %d: workers of ranks %s", parallel.node_rank, list(setup.ranks))
        node.run()
    finally:
        connection.close()
    logger.info("%s has stopped the engine", place)


def _connect(config: VllmConfig, place: str, timeout_s: float) -> MessageSocket:
    """Tries until the first host listens."""
    parallel = config.parallel_config
    logger.info("node %d: looking for %s", parallel.node_rank, place)
    whom = f"{place} (--master-addr)"
    return MessageSocket(connect(parallel.master_addr, parallel.master_port, timeout_s, whom))


def _join(hello: Hello, connection: MessageSocket, place: str, timeout_s: float) -> NodeSetup:
    """Agree with the first host, and wait until all others have."""
    try:
        connection.send(hello.encode(), lambda: None)
        message = connection.receive(timeout_s + _PATIENCE_S)
    except (OSError, EOFError) as error:
        raise NodeEndedError(f"{place} is gone: {error}") from None
    if message[0] == Tag.END:
        raise NodeRefusedError(f"{place} does not start: {json.loads(message[1:])['reason']}")
    setup: NodeSetup = pickle.loads(message[1:])
    return setup


class _Stuck(Exception):
    """The workers take no messages any more, for a reason that is about to be taken."""


class _Node:
    """Messages to the workers of this host, and their answers."""

    def __init__(self, connection: MessageSocket, workers: LocalWorkers, place: str) -> None:
        self._connection = connection
        self._workers = workers
        self._place = place
        self._beaten_s = -BEAT_S

    def run(self) -> None:
        """Until the end, which is that of the workers, too."""
        patience_s = LAST_WORDS_S
        try:
            reason = self._pass_on()
            if reason is not None:
                raise NodeEndedError(f"{self._place} ended the engine: {reason}")
            patience_s = STOP_S
        except BaseException as error:
            with contextlib.suppress(OSError, TimeoutError):
                reason = failure_of(error) or TOLD_TO_STOP
                self._connection.send(Tag.LEAVING.of_json(reason=reason), _give_up)
            raise
        finally:
            self._workers.begin_end(None)
            self._workers.finish_end(time.monotonic() + patience_s)
            self._workers.close()

    def _pass_on(self) -> str | None:
        """Returns why the first host has ended the engine; None: it was stopped."""
        death: WorkerDiedError | None = None
        with selectors.DefaultSelector() as selector:
            for source in (self._connection, *self._workers.sources):
                selector.register(source, selectors.EVENT_READ, source)
            deadline = math.inf
            while time.monotonic() < deadline:
                self._beat()
                for key, _ in selector.select(BEAT_S):
                    if key.data is self._connection:
                        for message in self._take():
                            if message[0] == Tag.END:
                                reason: str | None = json.loads(message[1:])["reason"]
                                return reason
                            self._give(message[1:])
                        continue
                    try:
                        for rank, answer in self._workers.take(key.data):
                            self._say(Tag.ANSWER.of(rank.to_bytes(4, "little") + answer))
                    except WorkerDiedError as error:
                        death, deadline = error, time.monotonic() + _VERDICT_S
                        selector.unregister(key.data)
                        was_killed = error.was_killed
                        self._say(Tag.DIED.of_json(reason=str(error), was_killed=was_killed))
        return f"{death}, and it does not answer"

    def _take(self) -> list[bytes]:
        try:
            return self._connection.take()
        except EOFError as error:
            raise NodeEndedError(f"{self._place} is gone: {error}") from None

    def _give(self, message: bytes) -> None:
        with contextlib.suppress(_Stuck):
            self._workers.send(message, self._check)

    def _beat(self) -> None:
        """Once a second: this host goes on, and these workers are seen to do something."""
        now_s = time.monotonic()
        if now_s - self._beaten_s >= BEAT_S:
            self._beaten_s = now_s
            working = [rank for rank in self._workers.ranks if self._workers.sees_work(rank)]
            self._say(Tag.BEAT.of_json(working=working))

    def _check(self) -> None:
        self._beat()
        if self._connection.is_closed() or self._workers.has_ended:
            raise _Stuck

    def _say(self, message: bytes) -> None:
        # A connection that is lost is noticed where messages are taken.
        with contextlib.suppress(OSError):
            self._connection.send(message, lambda: None)


def _give_up() -> None:
    raise TimeoutError("node 0 takes no messages")
