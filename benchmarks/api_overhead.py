# SPDX-License-Identifier: Apache-2.0
"""CPU time of the API process per output token, at many concurrent streams.

    python -m benchmarks.api_overhead [--streams 256] [--tokens 200] [--chat] [--output FILE]

Everything but the model is real (see `token_source`). The clients run in this process and read
bytes; the engine core has its own process. Counted is the API process alone: user and system time,
from the moment all streams have their first token until the last one ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

_START_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class TokenServer:
    """`benchmarks.token_source` in a process, ready on entering."""

    def __init__(self, *flags: str) -> None:
        self.port = free_port()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.token_source", "--port", str(self.port), *flags]
        )
        self.process = psutil.Process(self._popen.pid)

    def __enter__(self) -> TokenServer:
        deadline = time.monotonic() + _START_S
        with httpx.Client() as client:
            while time.monotonic() < deadline and self._popen.poll() is None:
                try:
                    client.get(f"http://127.0.0.1:{self.port}/health")
                    return self
                except httpx.TransportError:
                    time.sleep(0.1)
        self._popen.kill()
        raise RuntimeError("the server did not start")

    def __exit__(self, *exc: object) -> None:
        self._popen.terminate()
        self._popen.wait(60)

    def cpu_s(self) -> float:
        """User and system seconds of the API process, without its children."""
        times = self.process.cpu_times()
        return times.user + times.system


def request_bytes(num_tokens: int, chat: bool, **fields: object) -> bytes:
    """A streamed request as it goes over the wire, with `fields` in its body."""
    content = "Tell me about state memory."
    body: dict[str, object] = {"stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    body |= fields
    if chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": content}]
    else:
        path = "/v1/completions"
        body["prompt"] = content
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@dataclass
class Progress:
    """Streams that have begun, and the CPU time when the last of them did."""

    num_streams: int
    server: TokenServer
    num_begun: int = 0
    num_chunks_before: int = 0
    num_chunks: int = 0
    cpu_s: float = 0.0
    began: float = 0.0

    def begin(self) -> None:
        self.num_begun += 1
        if self.num_begun == self.num_streams:
            self.cpu_s, self.began = self.server.cpu_s(), time.monotonic()
            self.num_chunks_before = self.num_chunks


async def read_stream(port: int, request: bytes, progress: Progress) -> None:
    """One client: counts events until `[DONE]`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(request)
    begun = False
    tail = b""
    while b"[DONE]" not in tail:
        data = await reader.read(1 << 16)
        assert data, "the server closed a stream"
        progress.num_chunks += data.count(b"data: {")
        if not begun:
            begun = True
            progress.begin()
        tail = tail[-16:] + data
    writer.close()


async def run_clients(server: TokenServer, options: argparse.Namespace) -> Progress:
    request = request_bytes(options.tokens, options.chat)
    progress = Progress(options.streams, server)
    await asyncio.gather(
        *(read_stream(server.port, request, progress) for _ in range(options.streams))
    )
    return progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--profile", type=Path, help="speedscope file of py-spy, which must exist")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with TokenServer("--step-ms", str(options.step_ms)) as server:
        asyncio.run(run_clients(server, argparse.Namespace(**{**vars(options), "tokens": 5})))
        profiler = None
        if options.profile:
            profiler = subprocess.Popen(
                ["py-spy", "record", "-p", str(server.process.pid), "-r", "500", "-f", "raw"]
                + ["-d", "20", "-o", str(options.profile)]
            )
        progress = asyncio.run(run_clients(server, options))
        cpu_s, wall_s = server.cpu_s() - progress.cpu_s, time.monotonic() - progress.began
        if profiler is not None:
            profiler.wait()
    num_tokens = progress.num_chunks - progress.num_chunks_before
    result = {
        "route": "chat" if options.chat else "completions",
        "streams": options.streams,
        "events": num_tokens,
        "cpu_s": round(cpu_s, 3),
        "cpu_ms_per_token": round(cpu_s * 1e3 / num_tokens, 4),
        "tokens_per_s": round(num_tokens / wall_s),
    }
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
