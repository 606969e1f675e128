# SPDX-License-Identifier: Apache-2.0
"""The engine core as a process of its own.

Requests arrive on a ZMQ socket read by one thread, outputs leave through another, so that
(de)serialisation overlaps with the steps of the main thread.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import queue
import signal
import threading
import time
from collections.abc import Callable
from itertools import chain
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
import zmq

from vllm.exceptions import ExplainedError, VLLMValidationError
from vllm.logger import init_logger
from vllm.utils import startup_phases
from vllm.utils.imports import gc_paused, short_turns
from vllm.utils.parent_watch import ParentWatch, watch_parent
from vllm.utils.silence import BEAT_S
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    StopRequest,
    UtilityOutput,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_messages import CoreAddresses, CoreReady, CoreSetup
from vllm.v1.engine.parallel_sampling import child_requests
from vllm.v1.engine.plain_outputs import PlainOutputsPacker
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, pack_object, unpickle_setup

logger = init_logger(__name__)

#: outputs for a client, a new client's address, or None: the client is gone; None at the end
ForWriter = tuple[int, EngineCoreOutputs | str | None] | None

#: the client that started the core, and all clients
_FIRST_CLIENT = 0
_EVERYONE = -1
#: needed by every core, but not by this module
_IMPORTED_LATE = (
    "transformers.models.auto.configuration_auto",
    "vllm.model_executor.model_loader",
    "vllm.v1.executor.uniproc",
)
#: how long a core that has lost its parent may take to stop
_ORPHAN_GRACE_S = 20.0
#: A signal that arrives just before a wait, or at another thread, does not end the wait: its
#: handler runs when the main thread next does something.
_SIGNAL_POLL_S = 0.2
#: pause between steps that only wait for transfers
_TICK_S = 0.001
#: how long a shutdown waits for transfers of finished requests
_DRAIN_S = 5.0
_FLUSH_S = 5.0


class EngineCoreProc:
    """Feeds an `EngineCore` from a socket and sends what it produces."""

    def __init__(self, core: EngineCore, addresses: CoreAddresses) -> None:
        self._core = core
        self._addresses = addresses
        self._context = zmq.Context()
        self._inputs: queue.SimpleQueue[tuple[EngineCoreRequestType | None, Any]] = (
            queue.SimpleQueue()
        )
        self._outputs: queue.SimpleQueue[ForWriter] = queue.SimpleQueue()
        self._stopping = False
        core.executor.register_failure_callback(lambda error: self._inputs.put((None, error)))
        if core.joint is not None:
            core.joint.set_wake(lambda error: self._inputs.put((None, error)))
        self._reader = self._thread("core-input", self._read)
        self._writer = self._thread("core-output", self._write)
        self._reader.start()
        self._writer.start()

    def request_shutdown(self) -> None:
        """Make `run` return after its current step; safe in a signal handler."""
        self._inputs.put((EngineCoreRequestType.SHUTDOWN, None))

    def run(self) -> None:
        """Step until told to stop; any error is reported to the client and raised."""
        try:
            while not self._stopping:
                self._take_inputs()
                self._step()
            self._drain()
        except BaseException as error:
            root = error if self._core.joint is None else self._core.joint.cause_of(error)
            self._outputs.put((_EVERYONE, EngineCoreOutputs(fatal=_cause(root))))
            raise
        finally:
            self._outputs.put(None)
            self._writer.join(_FLUSH_S)

    # ---- the main thread -----------------------------------------------------------------------

    def _take_inputs(self) -> None:
        """Handle every message there is; with nothing to do, wait for one."""
        block = not self._core.has_work()
        if block and self._inputs.empty():
            block = not self._core.use_idle_time()
        while True:
            try:
                kind, payload = self._inputs.get(block=block, timeout=_SIGNAL_POLL_S)
            except queue.Empty:
                return
            self._handle(kind, payload)
            if self._stopping:
                return
            block = False

    def _handle(self, kind: EngineCoreRequestType | None, payload: Any) -> None:
        if kind is None:
            if payload is not None:
                raise payload
        elif kind is EngineCoreRequestType.ADD:
            client_index, requests = payload
            refused = [r for r in map(self._core.add_request, requests) if r is not None]
            if refused:
                outputs = EngineCoreOutputs(outputs=refused, timestamp=time.monotonic())
                self._outputs.put((client_index, outputs))
        elif kind is EngineCoreRequestType.ABORT:
            self._core.abort_requests(payload)
        elif kind is EngineCoreRequestType.STOP:
            self._core.stop_requests(payload)
        elif kind is EngineCoreRequestType.UTILITY:
            client_index, *call = payload
            outputs = EngineCoreOutputs(utility_output=self._call_utility(*call))
            self._outputs.put((client_index, outputs))
        elif kind is EngineCoreRequestType.DETACH:
            self._core.abort_client(payload)
        else:
            self._stopping = True

    def _call_utility(self, call_id: int, method: str, args: list[Any]) -> UtilityOutput:
        try:
            result = pack_object(self._core.call_utility(method, tuple(args)))
        except VLLMValidationError as error:
            return UtilityOutput(call_id, str(error), refused=True, parameter=error.parameter)
        except Exception as error:
            logger.exception("utility %s failed", method)
            return UtilityOutput(call_id, error=f"{type(error).__name__}: {error}")
        return UtilityOutput(call_id, result=result)

    def _step(self) -> None:
        if not self._core.has_work():
            return
        produced = self._core.step()
        for item in produced.items():
            self._outputs.put(item)
        if not produced and self._core.only_waits and self._inputs.empty():
            time.sleep(_TICK_S)

    def _drain(self) -> None:
        """End all requests and let transfers of finished ones complete, and steps of replicas that
        need this one."""
        core = self._core
        core.abort_requests(None)
        if core.joint is not None:
            core.joint.leave()
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline:
            if core.has_work():
                self._step()
            elif core.joint is None or core.joint.all_leave:
                return
            else:
                time.sleep(_TICK_S)

    # ---- the socket threads --------------------------------------------------------------------

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """A thread whose failure is raised by the main thread."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._inputs.put((None, error))

        return threading.Thread(target=run, name=name, daemon=True)

    def _read(self) -> None:
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(self._addresses.requests)
        requests = MsgpackDecoder(list[EngineCoreRequest])
        stops = MsgpackDecoder(list[StopRequest])
        anything: MsgpackDecoder[Any] = MsgpackDecoder(object)
        attached: dict[int, str] = {_FIRST_CLIENT: self._addresses.requests}
        while True:
            kind_frame, payload_frame = socket.recv_multipart()
            kind = EngineCoreRequestType(kind_frame)
            payload: Any
            if kind is EngineCoreRequestType.ADD:
                received = requests.decode(payload_frame)
                client_index = received[0].client_index
                if client_index not in attached:  # the last words of a client that is gone
                    continue
                children = chain.from_iterable(map(child_requests, received))
                payload = client_index, list(map(self._core.receive, children))
            elif kind is EngineCoreRequestType.STOP:
                payload = stops.decode(payload_frame)
            else:
                payload = anything.decode(payload_frame)
            if kind is EngineCoreRequestType.ATTACH:
                client_index, attached[payload[0]], outputs = payload
                socket.connect(attached[client_index])
                self._outputs.put((client_index, outputs))
                continue
            if kind is EngineCoreRequestType.DETACH:
                socket.disconnect(attached.pop(payload))
                self._outputs.put((payload, None))
            self._inputs.put((kind, payload))

    def _write(self) -> None:
        encoder = MsgpackEncoder()
        clients = {_FIRST_CLIENT: _OutputSocket(self._context, self._addresses.outputs)}
        try:
            while (item := self._outputs.get()) is not None:
                client_index, message = item
                if isinstance(message, str):
                    clients[client_index] = _OutputSocket(self._context, message)
                elif message is None:
                    clients.pop(client_index).close(linger_s=0)
                elif client_index == _EVERYONE:
                    for client in clients.values():
                        client.send(encoder, message)
                elif (one := clients.get(client_index)) is not None:  # else it is gone
                    one.send(encoder, message)
        except Exception as error:
            for client in clients.values():
                client.send(encoder, EngineCoreOutputs(fatal=str(error)))
            raise
        finally:
            for client in clients.values():
                client.close(linger_s=_FLUSH_S)


class _OutputSocket:
    """Outputs to one client."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)
        self._packer = PlainOutputsPacker()

    def send(self, encoder: MsgpackEncoder, outputs: EngineCoreOutputs) -> None:
        """Encode and hand over; never blocks."""
        self._socket.send(encoder.encode(self._packer.pack(outputs)))

    def close(self, linger_s: float) -> None:
        """What is not delivered `linger_s` from now is lost."""
        self._socket.close(linger=int(linger_s * 1000))


# ---- the process -------------------------------------------------------------------------------


def run_engine_core(work: Connection, ready: Connection) -> None:
    """Entry point of the core process: imports what a core needs, then waits at `work` for a
    cloudpickled `CoreSetup` and the `CoreAddresses`.

    Sends `CoreReady`, or the exception that stopped the start, through `ready`. Exits non-zero
    after an error. Ends by itself when the parent is gone.
    """
    signal.signal(signal.SIGTERM, _exit_during_start)
    startup_phases.take_events()  # a forked process begins with a copy of its parent's
    parent = watch_parent(_ORPHAN_GRACE_S)
    try:
        with gc_paused(), short_turns():
            import_everything()
        gc.freeze()
        try:
            setup, addresses = work.recv()
        except EOFError:  # there is nothing to run
            return
        parent.leftovers.append(addresses.directory)
        work.close()
        core = _start(setup)
    except Exception as error:
        if not isinstance(error, ExplainedError):
            logger.exception("the engine core could not start")
        _send_error(ready, error)
        raise SystemExit(1) from None
    proc = EngineCoreProc(core, addresses)
    signal.signal(signal.SIGTERM, lambda *_: proc.request_shutdown())
    cache = core.vllm_config.cache_config
    ready.send(
        CoreReady(
            cache.num_gpu_blocks,
            cache.capacity_tokens,
            core.vllm_config.model_config.max_model_len,
            core.vllm_config.decisions.decisions(),
            startup_phases.take_events(),
        )
    )
    threading.Thread(target=_beat, args=(ready,), name="core-beat", daemon=True).start()
    _run(core, proc, parent)


def _beat(words: Connection) -> None:
    """Thread: tell the front end that this process goes on."""
    with contextlib.suppress(OSError):  # nobody listens any more
        while True:
            words.send_bytes(b"")
            time.sleep(BEAT_S)


def _run(core: EngineCore, proc: EngineCoreProc, parent: ParentWatch) -> None:
    """Until the end. Other hosts are told where it is no stop: they would end as after one."""
    failure: str | None = None
    try:
        with core.vllm_config.decisions.current():
            proc.run()
        if parent.is_gone:
            failure = "the process of the API is gone"
    except Exception as error:
        failure = _cause(error)
        if isinstance(error, ExplainedError):
            logger.error("the engine core failed: %s", failure)
        else:
            logger.exception("the engine core failed")
        raise SystemExit(1) from None
    finally:
        core.shutdown(failure)


def _cause(error: BaseException) -> str:
    """What others are told of it."""
    return str(error) if isinstance(error, ExplainedError) else f"{type(error).__name__}: {error}"


def import_everything() -> None:
    """Import what a core needs besides this module, and initialise the device."""
    from vllm.platforms import current_platform

    current_platform.prepare_device()
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    _ = current_platform.kernels
    current_platform.set_device(torch.device(current_platform.device_type, 0))


def _start(setup: bytes) -> EngineCore:
    from vllm.v1.executor.abstract import Executor

    loaded: CoreSetup = unpickle_setup(setup)
    startup_phases.end("spawn engine")
    executor_class = loaded.executor_class or Executor.get_class(loaded.vllm_config)
    with loaded.vllm_config.decisions.current():
        return EngineCore(loaded.vllm_config, executor_class, loaded.log_stats)


def _exit_during_start(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _send_error(ready: Connection, error: Exception) -> None:
    """Errors that explain themselves, and those of the configuration, keep their type; anything
    else is described."""
    described: Exception = RuntimeError(
        f"the engine core could not start: {type(error).__name__}: {error}"
    )
    try:
        ready.send(error if isinstance(error, ExplainedError | ValueError) else described)
    except Exception:
        ready.send(described)
