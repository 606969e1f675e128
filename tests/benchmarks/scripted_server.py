# SPDX-License-Identifier: Apache-2.0
"""A server that plays scripts: which bytes it sends, and when; it notes when it did."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def events(*payloads: Any) -> bytes:
    """Server-sent events with these objects as JSON."""
    return b"".join(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads)


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The chunk before the end."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"choices": [], "usage": counts}


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@dataclass
class Visit:
    """One request: when it came and what it said, when each write of the script was made.

    Times are those of `time.perf_counter`, which all processes of a machine share.
    """

    arrived: float
    connection: int
    head: bytes
    body: bytes
    writes: list[float] = field(default_factory=list)
    ended: float = 0.0


class ScriptedServer:
    """Plays `scripts[prompt]`, or the only script there is, for every request.

    A script is a list of (seconds to wait, bytes to send); bytes None closes the connection.
    """

    def __init__(
        self,
        scripts: dict[str, Sequence[tuple[float, bytes | None]]],
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.scripts = scripts
        self._context = context
        self.visits: list[Visit] = []
        self.port = 0
        self.num_connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    @property
    def url(self) -> str:
        return f"http{'s' if self._context else ''}://127.0.0.1:{self.port}"

    def most_in_flight(self) -> int:
        """Of the visits that have ended."""
        changes = [(v.arrived, 1) for v in self.visits] + [(v.ended, -1) for v in self.visits]
        running = most = 0
        for _, change in sorted(changes):
            running += change
            most = max(most, running)
        return most

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, backlog=1024, ssl=self._context
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.num_connections
        self.num_connections += 1
        try:
            while await self._answer(reader, writer, number):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        arrived = time.perf_counter()
        lengths = [line for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")]
        body = await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
        visit = Visit(arrived, number, head, body)
        self.visits.append(visit)
        name = json.loads(body)["prompt"] if len(self.scripts) > 1 else next(iter(self.scripts))
        for delay_s, data in self.scripts[name]:
            await asyncio.sleep(delay_s)
            visit.writes.append(time.perf_counter())
            if data is None:
                visit.ended = time.perf_counter()
                return False
            writer.write(data)
        await writer.drain()
        visit.ended = time.perf_counter()
        return True
