# SPDX-License-Identifier: Apache-2.0
"""The front end's end of the sockets to a core process: sends, receives, and notices its death."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import zmq

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils import startup_phases
from vllm.utils.own_process import OwnProcess
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    StopRequest,
)
from vllm.v1.engine.core_messages import CoreAddresses
from vllm.v1.engine.core_process import CoreProcess, first_to_report
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.plain_outputs import PlainOutputsUnpacker
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, pack_object

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

#: takes outputs, and at the end of a dead engine the error; called on the reader's thread
Sink = Callable[[EngineCoreOutputs | EngineDeadError], None]

_SHUTDOWN_S = 15.0
_PEER_POLL_MS = 20
_PEER_TIMEOUT_MS = 1000


def client_addresses(directory: str, client_index: int) -> CoreAddresses:
    """Where a client of the core binds its sockets."""
    return CoreAddresses(
        f"ipc://{directory}/requests-{client_index}", f"ipc://{directory}/outputs-{client_index}"
    )


def new_directory() -> str:
    """For sockets and what else processes of an engine share."""
    return tempfile.mkdtemp(prefix="vllm-", dir=envs.VLLM_RPC_BASE_PATH)


class ClientLink(ABC):
    """One client's sockets to a core, which may have several clients.

    Holds no reference to its owner, so that a forgotten owner can be collected and `close` run by
    its finalizer. Belongs to the process that made it: in a forked child sending raises
    `RuntimeError`, and `close` leaves everything to the parent. `name`: which core it is, for
    errors.
    """

    def __init__(
        self, addresses: CoreAddresses, client_index: int, sink: Sink, name: str = ""
    ) -> None:
        self.client_index = client_index
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
        self._requests = self._bind(zmq.PUSH, addresses.requests)
        self._outputs = self._bind(zmq.PULL, addresses.outputs)
        self._stop_read, self._stop_write = os.pipe()
        self._reader = threading.Thread(target=self._read, name="core-outputs", daemon=True)

    @property
    @abstractmethod
    def process_id(self) -> int | None:
        """The core's process."""

    @property
    def core(self) -> CoreProcess | None:
        """It, if it is this link's own."""
        return None

    @abstractmethod
    def wait_ready(self) -> None:
        """Block until the core can take requests; raises what kept it from starting."""

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
        self._end_core(_SHUTDOWN_S if timeout_s is None else timeout_s)
        self._release_files()

    @abstractmethod
    def _end_core(self, timeout_s: float) -> None: ...

    @abstractmethod
    def _core_ended(self) -> str | None:
        """Why nothing more comes although nobody said so; None while the core runs."""

    @abstractmethod
    def _watched(self) -> list[int]:
        """Files that become readable when `_core_ended` may say something."""

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
        for watched in self._watched():
            poller.register(watched, zmq.POLLIN)
        try:
            while True:
                events = dict(poller.poll())
                if self._stop_read in events:
                    return self._die(self._core_ended() or "it was shut down")
                if self._outputs in events:
                    outputs = decoder.decode(self._outputs.recv())
                    if outputs.fatal is not None:
                        return self._die(outputs.fatal)
                    unpacker.unpack(outputs)
                    self._deliver(outputs)
                elif self._closing:
                    # Whoever closes waits for the process, and only one thread can.
                    for watched in self._watched():
                        poller.unregister(watched)
                elif (cause := self._core_ended()) is not None:
                    return self._die(cause)
        except Exception as error:
            logger.exception("reading the engine core's outputs failed")
            self._die(f"its outputs cannot be read: {error}")

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        reply = outputs.utility_output
        if reply is None:
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


class StartedCore:
    """A core process that was told what to run. Processes start before any socket or thread exists,
    so that forking is safe.

    `environment`: see `CoreProcess`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor] | None,
        log_stats: bool,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        #: where its clients may put their sockets
        self.directory = new_directory()
        #: removed when nobody uses the core any more
        self.directories = [self.directory]
        addresses = client_addresses(self.directory, 0)
        try:
            with vllm_config.decisions.current():
                self.core = CoreProcess(
                    vllm_config, executor_class, log_stats, addresses, environment
                )
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def stop(self) -> None:
        """End it; nobody uses it."""
        self.core.stop(0.0)
        self.remove_files()

    def remove_files(self) -> None:
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)


class CoreLink(ClientLink):
    """A core process of one's own and the sockets to it; nothing may be sent before `wait_ready`
    has returned. Its client has the index 0, and tells the core of further ones.

    `reports_start`: whether the core's start is a part of this process's, phase by phase.
    """

    def __init__(
        self, started: StartedCore, sink: Sink, name: str = "", reports_start: bool = True
    ) -> None:
        self._vllm_config = started.vllm_config
        self._files = started
        self._core = started.core
        self._reports_start = reports_start
        self._started = False
        #: where further clients may put their sockets
        self.directory = started.directory
        super().__init__(client_addresses(self.directory, 0), 0, sink, name)
        atexit.register(self.close)

    def wait_ready(self) -> None:
        """Block until the core can take requests; fill in what it decided.

        Raises what `CoreProcess.wait_ready` raises; the link is closed then.
        """
        try:
            ready = self._core.wait_ready()
        except BaseException as error:
            # A core that reported an error is ending; a signal would cut its clean-up short.
            ends_itself = isinstance(error, (ValueError, RuntimeError))
            self.close(_SHUTDOWN_S if ends_itself else 0.0)
            raise
        if self._reports_start:
            startup_phases.adopt(ready.phases)
        config = self._vllm_config
        config.decisions.adopt(ready.decisions)
        assert config.model_config is not None
        config.cache_config.num_gpu_blocks = ready.num_gpu_blocks
        config.cache_config.capacity_tokens = ready.capacity_tokens
        config.model_config.max_model_len = ready.max_model_len
        config.scheduler_config.max_model_len = ready.max_model_len
        self._started = True
        self._reader.start()

    @property
    def core(self) -> CoreProcess | None:
        return self._core

    @property
    def process_id(self) -> int | None:
        return self._core.process.pid

    def attach(self, client_index: int) -> None:
        """The core listens to the client whose sockets are at `client_addresses`; they may come
        later. An index is used once."""
        addresses = client_addresses(self.directory, client_index)
        message = (client_index, addresses.requests, addresses.outputs)
        self._send(EngineCoreRequestType.ATTACH, message)

    def detach(self, client_index: int) -> None:
        """The client is gone: its requests are aborted."""
        self._send(EngineCoreRequestType.DETACH, client_index)

    def _watched(self) -> list[int]:
        return [self._core.process.sentinel]

    def _core_ended(self) -> str | None:
        if self._closing or self._core.process.is_alive():
            return None
        self._core.process.join(1.0)
        return f"its process ended (exit code {self._core.process.exitcode})"

    def begin_close(self) -> None:
        if not self.process.is_own:
            return
        with self._send_lock:
            if self._closing:
                return
            self._closing = True
            if self._started and self.dead is None:
                with contextlib.suppress(zmq.ZMQError):
                    self._requests.setsockopt(zmq.LINGER, 1000)
                    frames = (EngineCoreRequestType.SHUTDOWN.value, b"\xc0")
                    if self._requests.poll(_PEER_TIMEOUT_MS, zmq.POLLOUT):
                        self._requests.send_multipart(frames)

    def _end_core(self, timeout_s: float) -> None:
        atexit.unregister(self.close)
        self._core.stop(timeout_s)

    def _release_files(self) -> None:
        super()._release_files()
        self._files.remove_files()


def await_ready(links: Sequence[ClientLink]) -> None:
    """Block until all cores can take requests; raises the error of the first that fails, for which
    others may wait in vain."""
    own = {link.core: link for link in links if link.core is not None}
    while own:
        own.pop(first_to_report(list(own))).wait_ready()
    for link in links:
        if link.core is None:
            link.wait_ready()


class AttachedLink(ClientLink):
    """The sockets of a further client of a core that runs already; who started the core has told it
    of this client, and calls `lose` when the core has died."""

    def __init__(
        self, directory: str, client_index: int, core_process_id: int | None, sink: Sink
    ) -> None:
        self._core_process_id = core_process_id
        self._lost: str | None = None
        super().__init__(client_addresses(directory, client_index), client_index, sink)

    @property
    def process_id(self) -> int | None:
        return self._core_process_id

    def wait_ready(self) -> None:
        if self._reader.ident is None:
            self._reader.start()

    def lose(self, cause: str) -> None:
        """The core is gone."""
        with self._send_lock:
            if not self._closed and self._lost is None:
                self._lost = cause
                os.write(self._stop_write, b"x")

    def _end_core(self, timeout_s: float) -> None:
        """It is another process's."""

    def _watched(self) -> list[int]:
        return []

    def _core_ended(self) -> str | None:
        return self._lost
