# SPDX-License-Identifier: Apache-2.0
"""The bytes of one streamed reply, when they came, and the events among them."""

from __future__ import annotations

from collections.abc import Iterator

_DONE = b"[DONE]"


class Reply:
    """What a connection received for one request.

    While a load runs, bytes and times are only kept: a token costs no parsing. `times[i]` is when
    the read came that ended at byte `ends[i]` of the body; one read may hold many events, and an
    event may come in several reads.
    """

    __slots__ = ("body", "ends", "status", "times")

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.ends: list[int] = []
        self.times: list[float] = []

    def note_read(self, now: float) -> None:
        """Say when what is new in the body came; without effect if nothing is."""
        end = len(self.body)
        if end > (self.ends[-1] if self.ends else 0):
            self.ends.append(end)
            self.times.append(now)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Arrival time and data of each server-sent event, without the closing `[DONE]`.

        An event has come when its line is complete; a line that never ended is no event.
        """
        read = position = 0
        lines = bytes(self.body).split(b"\n")
        for line in lines[:-1]:
            position += len(line) + 1
            if not line.startswith(b"data:"):
                continue
            while self.ends[read] < position:
                read += 1
            data = line[5:].strip()
            if data != _DONE:
                yield self.times[read], data
