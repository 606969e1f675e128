# SPDX-License-Identifier: Apache-2.0
"""Workers that are reached over TCP."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator

from vllm.utils.silence import SILENT_S
from vllm.v1.executor.message_socket import MessageSocket
from vllm.v1.executor.node_messages import Tag
from vllm.v1.executor.station import Source, Station, WorkerDiedError


class RemoteWorkers(Station):
    """Workers behind one connection; `name`: where they are, for errors."""

    def __init__(self, connection: MessageSocket, ranks: range, name: str) -> None:
        self.ranks = ranks
        self.name = name
        self._connection = connection
        #: of the last beat
        self._working: list[int] | None = None
        self._beaten_s = 0.0

    @property
    def own_address(self) -> str:
        """The address of this host that the other one has reached."""
        return self._connection.own_address

    def say(self, message: bytes, patience_s: float = 0.0) -> None:
        """Something that is not for the workers; who is gone hears nothing. `TimeoutError` if it is
        not taken in that time."""
        deadline = time.monotonic() + patience_s

        def check() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} takes no messages")

        # A timeout is an OSError, too.
        with contextlib.suppress(ConnectionError):
            self._connection.send(message, check)

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        # Who takes notices that the connection is lost.
        with contextlib.suppress(OSError):
            self._connection.send(Tag.WORK.of(message), check)

    @property
    def sources(self) -> list[Source]:
        return [self._connection]

    def take(self, source: Source) -> Iterator[tuple[int, bytes]]:
        try:
            messages = self._connection.take()
        except EOFError as error:
            raise WorkerDiedError(f"{self.name} is gone: {error}") from None
        for message in messages:
            tag, content = Tag(message[0]), message[1:]
            if tag is Tag.ANSWER:
                yield int.from_bytes(content[:4], "little"), content[4:]
            elif tag is Tag.BEAT:
                self._working = json.loads(content)["working"]
                self._beaten_s = time.monotonic()
            else:
                raise self._end(tag, **json.loads(content))

    def _end(self, tag: Tag, reason: str, was_killed: bool = True) -> WorkerDiedError:
        what = f"{reason}, on {self.name}" if tag is Tag.DIED else f"{self.name} ended: {reason}"
        return WorkerDiedError(what, was_killed)

    def slow_ranks(self) -> list[int]:
        return []

    def sees_work(self, rank: int) -> bool | None:
        if self._working is None:  # its workers begin
            return None
        beats = time.monotonic() - self._beaten_s < SILENT_S
        return beats and rank in self._working

    def begin_end(self, reason: str | None) -> None:
        with contextlib.suppress(OSError):
            self.say(Tag.END.of_json(reason=reason))

    def finish_end(self, deadline: float) -> None:
        """A node closes the connection when its workers are gone."""
        self._connection.wait_until_closed(deadline - time.monotonic())

    def close(self) -> None:
        self._connection.close()
