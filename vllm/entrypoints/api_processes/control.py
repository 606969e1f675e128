# SPDX-License-Identifier: Apache-2.0
"""Calls between an API process and its supervisor, in both directions, over one pipe."""

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

logger = init_logger(__name__)

#: what the other end may call, by name
Handlers = Mapping[str, Callable[..., Awaitable[Any]]]


class PeerGoneError(Exception):
    """The process at the other end has ended."""


class CallFailedError(Exception):
    """The other end could not do what was asked."""


class ControlPort:
    """One end of the pipe, on one event loop. Both ends are processes of one program: what travels
    is pickled."""

    def __init__(self, pipe: Connection, handlers: Handlers) -> None:
        self._pipe = pipe
        self._handlers = handlers
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._send_lock = threading.Lock()
        self._is_open = True
        self._reader = threading.Thread(target=self._read, name="control", daemon=True)
        self._reader.start()

    async def call(self, name: str, *args: Any) -> Any:
        """What the other end's handler returns; raises `PeerGoneError`, `CallFailedError`, or the
        handler's own `VLLMValidationError`."""
        if not self._is_open:
            raise PeerGoneError("the process at the other end is gone")
        call_id = next(self._ids)
        future = self._calls[call_id] = self._loop.create_future()
        try:
            self._send(("call", call_id, name, args))
            return await future
        finally:
            self._calls.pop(call_id, None)

    def close(self) -> None:
        """End all calls; the other end sees that this one is gone."""
        if self._is_open:
            self._is_open = False
            self._fail_calls()
            self._pipe.close()

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            with self._send_lock:
                self._pipe.send(message)
        except (OSError, ValueError):
            raise PeerGoneError("the process at the other end is gone") from None

    def _read(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed here meanwhile
                message = None
            try:
                self._loop.call_soon_threadsafe(self._take, message)
            except RuntimeError:  # the loop is closed
                return
            if message is None:
                return

    def _take(self, message: tuple[Any, ...] | None) -> None:
        if message is None:
            self.close()
            return
        kind, call_id, *rest = message
        if kind == "call":
            task = self._loop.create_task(self._answer(call_id, *rest))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        future = self._calls.get(call_id)
        if future is None or future.done():
            return
        (value,) = rest
        if kind == "error":
            future.set_exception(value)
        else:
            future.set_result(value)

    async def _answer(self, call_id: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            answer = ("result", call_id, await self._handlers[name](*args))
        except VLLMValidationError as error:
            refusal = VLLMValidationError(str(error), error.parameter)
            answer = ("error", call_id, refusal)
        except Exception as error:
            logger.exception("%s failed", name)
            described = CallFailedError(f"{type(error).__name__}: {error}")
            answer = ("error", call_id, described)
        try:
            self._send(answer)
        except PeerGoneError:
            return

    def _fail_calls(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(PeerGoneError("the process at the other end is gone"))
