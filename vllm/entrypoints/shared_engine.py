# SPDX-License-Identifier: Apache-2.0
"""One synchronous engine for several threads: they take turns, and each gets its own outputs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from vllm.outputs import RequestOutput

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class _Ticket:
    """Of a thread that asks for a turn: its lock is released when the turn `has_come`."""

    def __init__(self) -> None:
        self.has_come = False
        self.lock = threading.Lock()
        self.lock.acquire()


class Turn:
    """A lock that threads get in the order in which they asked, so that one that takes it again
    and again keeps nobody waiting. `before`: called first, may refuse by raising."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._mutex = threading.Lock()
        self._held = False
        self._queue: deque[_Ticket] = deque()

    def __enter__(self) -> None:
        self._before()
        ticket = _Ticket()
        try:
            with self._mutex:
                if not self._held:
                    self._held = ticket.has_come = True
                    return
                self._queue.append(ticket)
            ticket.lock.acquire()
        except BaseException:  # an interrupt; the turn may have come with it
            with self._mutex:
                if ticket in self._queue:
                    self._queue.remove(ticket)
            if ticket.has_come:
                self._pass_on()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._mutex:
            if self._queue:
                ticket = self._queue.popleft()
                ticket.has_come = True
                ticket.lock.release()
            else:
                self._held = False


class SharedEngine:
    """Whoever waits for outputs steps the engine for all in his `turn`, and leaves to the others
    what is theirs. Every use of the engine needs the turn."""

    def __init__(self, engine: LLMEngine) -> None:
        self.turn = Turn(engine.engine_core.require_own_process)
        self._engine = engine
        #: where those who wait for a request find its last output
        self._places: dict[str, list[RequestOutput]] = {}

    def expect(self, request_id: str, place: list[RequestOutput]) -> None:
        """The caller, in his turn, starts this request and will wait for it at `place`."""
        self._places[request_id] = place

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Take last outputs to those who wait for them; in a turn."""
        for output in outputs:
            if output.finished and output.request_id in self._places:
                self._places.pop(output.request_id).append(output)

    def wait(
        self, ids: list[str], place: list[RequestOutput], done: Callable[[int], object]
    ) -> list[RequestOutput]:
        """The last outputs of these requests, in this order; `done` is told how many more came."""
        finished: dict[str, RequestOutput] = {}
        while len(finished) < len(ids):
            with self.turn:
                if not place:
                    self.deliver(self._engine.step())
                came = [place.pop() for _ in range(len(place))]
            finished.update((output.request_id, output) for output in came)
            if came:
                done(len(came))
        return [finished[request_id] for request_id in ids]

    def abandon(self, ids: list[str]) -> None:
        """Nobody waits for these any more: stop those that run, without an error of its own."""
        for request_id in ids:
            self._places.pop(request_id, None)
        try:
            with self.turn:
                self._engine.abort_request(ids)
        except Exception:
            return
