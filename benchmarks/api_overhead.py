# SPDX-License-Identifier: Apache-2.0
"""CPU time of the API process per output token, at many concurrent streams.

    python -m benchmarks.api_overhead [--streams 64,256] [--tokens 200] [--output FILE]
    python -m benchmarks.api_overhead --chat [--parsers] [--output FILE]

Everything but the model is real (see `token_source`). The clients run in this process and read
bytes; the engine core has its own process. Counted is the API process alone: user and system time,
from the moment all streams have their first token until the last one ends; of several rounds the
median.

With `--parsers` the server reads reasoning and tool calls in every reply, requests have a tool that
the model may call, and half of each reply is reasoning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.served_process import Cpu, TokenServer

_WARM_UP_TOKENS = 5
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Point:
    """Figures of one number of streams: medians of the rounds, per token in microseconds. An
    event is a token, unless the process falls behind or a parser keeps the token back."""

    streams: int
    rounds: int
    tokens: int
    events: int
    cpu_us_per_token: float
    user_us_per_token: float
    system_us_per_token: float
    tokens_per_s: int


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
    cpu: Cpu = Cpu(0.0, 0.0)
    began: float = 0.0

    def begin(self) -> None:
        self.num_begun += 1
        if self.num_begun == self.num_streams:
            self.cpu, self.began = self.server.api_cpu(), time.monotonic()
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


async def run_clients(server: TokenServer, num_streams: int, request: bytes) -> Progress:
    progress = Progress(num_streams, server)
    await asyncio.gather(*(read_stream(server.port, request, progress) for _ in range(num_streams)))
    return progress


def measure_round(
    server: TokenServer, num_streams: int, options: argparse.Namespace
) -> dict[str, float]:
    """The figures of one load, by the names of `Point`."""
    fields = {"tools": [_TOOL]} if options.parsers else {}

    def load(num_tokens: int) -> Progress:
        request = request_bytes(num_tokens, options.chat, **fields)
        return asyncio.run(run_clients(server, num_streams, request))

    load(_WARM_UP_TOKENS)
    progress = load(options.tokens)
    spent, wall_s = server.api_cpu().since(progress.cpu), time.monotonic() - progress.began
    # A chat's first chunk has no token, every other one before the start one, nearly always.
    num_before = progress.num_chunks_before - num_streams * options.chat
    tokens = num_streams * options.tokens - num_before
    return {
        "tokens": tokens,
        "events": progress.num_chunks - progress.num_chunks_before,
        "cpu_us_per_token": (spent.user_s + spent.system_s) * 1e6 / tokens,
        "user_us_per_token": spent.user_s * 1e6 / tokens,
        "system_us_per_token": spent.system_s * 1e6 / tokens,
        "tokens_per_s": tokens / wall_s,
    }


def measure(server: TokenServer, num_streams: int, options: argparse.Namespace) -> Point:
    """Medians of all rounds with one number of streams."""
    rounds = [measure_round(server, num_streams, options) for _ in range(options.rounds)]
    middle = {name: median(one[name] for one in rounds) for name in rounds[0]}
    return Point(
        streams=num_streams,
        rounds=options.rounds,
        tokens=round(middle["tokens"]),
        events=round(middle["events"]),
        cpu_us_per_token=round(middle["cpu_us_per_token"], 1),
        user_us_per_token=round(middle["user_us_per_token"], 1),
        system_us_per_token=round(middle["system_us_per_token"], 1),
        tokens_per_s=round(middle["tokens_per_s"]),
    )


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=stream_counts, default=[64, 256], help="comma list")
    parser.add_argument("--tokens", type=int, default=200, help="per reply")
    parser.add_argument("--rounds", type=int, default=3, help="of each number of streams")
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--chat", action="store_true", help="the chat route, not completions")
    parser.add_argument("--parsers", action="store_true", help="of reasoning and tool calls (chat)")
    parser.add_argument("--profile", type=Path, help="speedscope file of py-spy, which must exist")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    if options.parsers and not options.chat:
        parser.error("--parsers needs --chat: completions are text alone")
    return options


def stream_counts(text: str) -> list[int]:
    """`64,256`."""
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("expected positive numbers")
    return counts


def server_flags(options: argparse.Namespace) -> list[str]:
    """Those of `benchmarks.token_source`."""
    flags = ["--step-ms", str(options.step_ms), "--max-num-seqs", str(max(options.streams))]
    if options.parsers:
        flags += ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder"]
        flags += ["--reasoning-tokens", str(options.tokens // 2)]
    return flags


def main() -> int:
    options = parse_arguments()
    with TokenServer(*server_flags(options)) as server:
        profiler = None
        if options.profile:
            profiler = subprocess.Popen(
                ["py-spy", "record", "-p", str(server.process.pid), "-r", "500", "-f", "raw"]
                + ["-d", "20", "-o", str(options.profile)]
            )
        points = [measure(server, streams, options) for streams in options.streams]
        if profiler is not None:
            profiler.wait()
    route = "chat" if options.chat else "completions"
    result: dict[str, Any] = {
        "route": f"{route}, reasoning and tool parsers" if options.parsers else route,
        "points": [asdict(point) for point in points],
    }
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
