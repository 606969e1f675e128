# SPDX-License-Identifier: Apache-2.0
"""A client's sockets to a core: requests and calls leave, outputs and answers arrive."""

from __future__ import annotations

import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils.own_process import OwnProcess
from vllm.utils.silence import BEAT_S
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    StopRequest,
)
from vllm.v1.engine.core_messages import CoreAddresses
from vllm.v1.engine.core_process import CoreProcess
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.plain_outputs import PlainOutputsUnpacker
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, pack_object

logger = init_logger(__name__)

#: takes outputs, and at the end of a dead engine the error; called on the reader's thread
Sink = Callable[[EngineCoreOutputs | EngineDeadError], None]

#: how long a core may take to end cleanly
SHUTDOWN_S = 15.0
_PEER_POLL_MS = 20
#: for what a core said before its process ended, which may arrive later than the end is seen
_LAST_WORDS_MS = 500


def client_addresses(directory: str, client_index: int) -> CoreAddresses:
    """Where a client of the core binds its sockets."""
    return CoreAddresses(
        f"ipc://{directory}/requests-{client_index}", f"ipc://{directory}/outputs-{client_index}"
    )


class ClientLink(ABC):
    """One client's sockets to a core, which may have several clients.

    Holds no reference to its owner, so that a forgotten owner can be collected and `close` run by
    its finalizer. Belongs to the process that made it: in a forked child sending raises
    `RuntimeError`, and `close` leaves everything to the parent. `rank`: the replica that outputs
    come from; `name`: which core it is, for errors; `core`: its process, if it is this link's own.
    """

    def __init__(
        self,
        directory: str,
        client_index: int,
        rank: int,
        sink: Sink,
        name: str = "",
        core: CoreProcess | None = None,
    ) -> None:
        self.core = core
        self.client_index = client_index
        self._rank = rank
        self._name = name
        self.process = OwnProcess()
        self.dead: EngineDeadError | None = None
        self._sink = sink
        self._encoder = MsgpackEncoder()
        self._send_lock = threading.RLock()  # a signal handler may close while sending
        self._call_ids = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._closing = self._closed = False
        self._context = zmq.Context()
        addresses = client_addresses(directory, client_index)
        self._requests = self._bind(zmq.PUSH, addresses.requests)
        self._outputs = self._bind(zmq.PULL, addresses.outputs)
        self._stop_read, self._stop_write = os.pipe()
        self._reader = threading.Thread(target=self._read, name="core-outputs", daemon=True)

    def begin_close(self) -> None:
        """Tell the core to stop if it is this link's own, and do not wait for it."""
        self._closing = True

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the core if it is this link's own, release sockets, thread and files; safe to call
        twice. The core gets `timeout_s` seconds (15 by default) to end cleanly before it is killed.
        """
        if not self.process.is_own:
            return
        self.begin_close()
        with self._send_lock:
            if self._closed:
                return
            self._closed = True
        if self._reader.ident is not None:
            os.write(self._stop_write, b"x")
            if threading.current_thread() is not self._reader:
                self._reader.join()
        if self.core is not None:
            self.core.stop(SHUTDOWN_S if timeout_s is None else timeout_s)
        self._release_files()

    @abstractmethod
    def _core_ended(self) -> str | None:
        """Why nothing more comes although nobody said so; None while the core runs."""

    def _bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        return socket

    # ---- sending -------------------------------------------------------------------------------

    def add(self, requests: list[EngineCoreRequest]) -> None:
        self.process.require()
        for request in requests:
            request.client_index = self.client_index
        self._send(EngineCoreRequestType.ADD, requests)

    def abort(self, request_ids: list[str]) -> None:
        self._send(EngineCoreRequestType.ABORT, request_ids)

    def stop(self, stops: list[StopRequest]) -> None:
        self._send(EngineCoreRequestType.STOP, stops)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Run a utility in the core. The future fails with `VLLMValidationError` when the call
        cannot be honoured, with `EngineGenerateError` when the utility fails, with
        `EngineDeadError` when the engine dies first."""
        call_id = next(self._call_ids)
        future: Future[Any] = Future()
        self._calls[call_id] = future
        message = (self.client_index, call_id, method, [pack_object(arg) for arg in args])
        try:
            self._send(EngineCoreRequestType.UTILITY, message)
        except BaseException:
            self._calls.pop(call_id, None)
            raise
        return future

    def _send(self, kind: EngineCoreRequestType, message: Any) -> None:
        self.process.require()
        if self.dead is not None:
            raise EngineDeadError(self.dead.cause)
        frame = self._encoder.encode(message)
        with self._send_lock:
            if self._closing:
                raise EngineDeadError("it was shut down")
            # Without its peer the socket would wait for another one, which never comes.
            while not self._requests.poll(_PEER_POLL_MS, zmq.POLLOUT):
                if self.dead is not None:
                    raise EngineDeadError(self.dead.cause)
            self._requests.send_multipart((kind.value, frame))

    # ---- receiving (reader thread) -------------------------------------------------------------

    def _read(self) -> None:
        decoder = MsgpackDecoder(EngineCoreOutputs)
        unpacker = PlainOutputsUnpacker()
        poller = zmq.Poller()
        poller.register(self._outputs, zmq.POLLIN)
        poller.register(self._stop_read, zmq.POLLIN)
        if self.core is not None:
            poller.register(self.core.process.sentinel, zmq.POLLIN)
        listen_ms = None if self.core is None else int(BEAT_S * 1000)
        try:
            while True:
                events = dict(poller.poll(listen_ms))
                if self.core is not None and not self._closing:
                    self.core.listen()
                if self._stop_read in events:
                    return self._die(self._core_ended() or "it was shut down")
                if self._outputs in events:
                    outputs = decoder.decode(self._outputs.recv())
                    if outputs.fatal is not None:
                        return self._die(outputs.fatal)
                    unpacker.unpack(outputs)
                    self._deliver(outputs)
                elif self._closing and self.core is not None:
                    # Whoever closes waits for the process, and only one thread can.
                    poller.unregister(self.core.process.sentinel)
                elif (cause := self._core_ended()) is not None:
                    if not self._outputs.poll(_LAST_WORDS_MS):
                        return self._die(cause)
        except Exception as error:
            logger.exception("reading the engine core's outputs failed")
            self._die(f"its outputs cannot be read: {error}")

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        reply = outputs.utility_output
        if reply is None:
            outputs.engine_index = self._rank
            self._sink(outputs)
            return
        future = self._calls.pop(reply.call_id)
        if not future.set_running_or_notify_cancel():
            return
        if reply.error is None:
            future.set_result(reply.result)
        elif reply.refused:
            future.set_exception(VLLMValidationError(reply.error, reply.parameter))
        else:
            future.set_exception(EngineGenerateError(reply.error))

    def _die(self, cause: str) -> None:
        error = EngineDeadError(f"{self._name}{cause}")
        self.dead = error
        for future in list(self._calls.values()):
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._calls.clear()
        self._sink(error)

    def _release_files(self) -> None:
        self._context.destroy(linger=0)
        os.close(self._stop_read)
        os.close(self._stop_write)
