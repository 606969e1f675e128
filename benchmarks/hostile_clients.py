# SPDX-License-Identifier: Apache-2.0
"""What clients that ask for as much as they can do to another client's time to first token.

    python -m benchmarks.hostile_clients --url http://127.0.0.1:8000 [--seconds 60] [--seed 0]

A polite client streams short completions while hostile ones, in a process of their own, come and
go: quiet and hostile seconds alternate, so that both see the same machine. Each hostile client
sends one kind of request over and over: small bodies that ask for much, past the server's limits
or just within them. Exit status 1 if the polite client's median time to first token is more than
twice its quiet value, or if a hostile request gets another answer than it should.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import httpx

#: the polite client's time to first token may grow by this
LIMIT = 2.0
_PAUSE_S = 0.02
_HOSTILE_PAUSE_S = 1.0
_QUIET_WINDOW_S, _HOSTILE_WINDOW_S = 0.8, 1.6
_POLL_S = 0.01
_PROMPT_TOKENS = 1900
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Attack:
    """A request that asks for much; `status` is what it should get."""

    name: str
    path: str
    body: dict[str, Any]
    status: int


@dataclass
class Replies:
    """Seconds that each kind of hostile request took, and the answers that were wrong."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """Seconds to the polite client's first tokens, alone and beside the hostile ones."""

    quiet_s: list[float]
    hostile_s: list[float]
    replies: Replies

    @property
    def ratio(self) -> float:
        """How many times longer the polite client waited, by the medians."""
        return statistics.median(self.hostile_s) / statistics.median(self.quiet_s)


def attacks(seed: int) -> list[Attack]:
    """One of each kind; words and prompts differ with the seed."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 9))) for _ in range(2000)]
    prompt = [rng.randrange(10, 200) for _ in range(_PROMPT_TOKENS)]
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": rng.choice("abc")} for i in range(300)]
    biases = {str(token): 1.0 for token in range(2000)}
    few_biases = {str(token): 1.0 for token in range(200)}

    def completion(name: str, status: int, **fields: Any) -> Attack:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 1.0, **fields}
        return Attack(name, "/v1/completions", body, status)

    internal = {"token_ids": [1, 2], "sampling_params": {"bad_words_token_ids": [[999_999]]}}
    marked = {"messages": talk, "cache_checkpoints": "messages", "max_tokens": 1}
    return [
        completion("bad words", 400, bad_words=[*words, "a" * 40_000]),
        completion("bad words, within", 200, bad_words=words[:1000]),
        completion("n x biases", 400, n=3000, logit_bias=biases),
        completion("n x biases, within", 200, n=8, logit_bias=few_biases),
        completion("marks", 400, prompt=prompt, cache_checkpoints=list(range(1, 1900))),
        Attack("300 messages, marked", "/v1/chat/completions", marked, 200),
        completion("10 MB of text", 400, prompt="a " * 5_000_000),
        completion("penalty", 400, repetition_penalty=1e39),
        Attack("internal field", "/inference/v1/generate", internal, 400),
    ]


async def first_token_s(client: httpx.AsyncClient, body: bytes) -> float:
    """Seconds from sending a streamed completion to its first event; reads it to the end."""
    began, first = time.perf_counter(), None
    async with client.stream("POST", "/v1/completions", content=body, headers=_JSON) as reply:
        async for piece in reply.aiter_bytes():
            if first is None and b"data: {" in piece:
                first = time.perf_counter() - began
    if first is None:
        raise RuntimeError(f"the polite client got no token: status {reply.status_code}")
    return first


async def be_polite(client: httpx.AsyncClient, seconds: float, times: list[float]) -> None:
    """One short stream after the other."""
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        times.append(await first_token_s(client, data))
        await asyncio.sleep(_PAUSE_S)


async def be_hostile(
    client: httpx.AsyncClient,
    attack: Attack,
    replies: Replies,
    delay_s: float,
    go: Event,
    stop: Event,
) -> None:
    """The same request again and again while `go` is set, from `delay_s` after that on."""
    data = json.dumps(attack.body).encode()
    waited_s = 0.0
    while not stop.is_set():
        if not go.is_set() or waited_s < delay_s:
            await asyncio.sleep(_POLL_S)
            waited_s = waited_s + _POLL_S if go.is_set() else 0.0
            continue
        began = time.perf_counter()
        reply = await client.post(attack.path, content=data, headers=_JSON)
        replies.seconds.setdefault(attack.name, []).append(time.perf_counter() - began)
        if reply.status_code != attack.status:
            replies.wrong.append(f"{attack.name}: {reply.status_code} {reply.text[:200]}")
        await asyncio.sleep(_HOSTILE_PAUSE_S)


def run_hostile(url: str, seed: int, go: Event, stop: Event, result: Connection) -> None:
    """The hostile process: sends its `Replies` when told to stop."""

    async def main() -> Replies:
        replies = Replies()
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
            kinds = attacks(seed)
            await asyncio.gather(
                *(
                    be_hostile(client, kind, replies, i / len(kinds) * _HOSTILE_PAUSE_S, go, stop)
                    for i, kind in enumerate(kinds)
                )
            )
        return replies

    result.send(asyncio.run(main()))


async def _alternate(url: str, seconds: float, go: Event) -> tuple[list[float], list[float]]:
    quiet_s: list[float] = []
    hostile_s: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
        await be_polite(client, _QUIET_WINDOW_S, [])
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            await be_polite(client, _QUIET_WINDOW_S, quiet_s)
            go.set()
            await be_polite(client, _HOSTILE_WINDOW_S, hostile_s)
            go.clear()
            # What is on its way belongs to neither.
            await be_polite(client, _QUIET_WINDOW_S / 2, [])
    return quiet_s, hostile_s


def run(url: str, seconds: float, seed: int) -> Outcome:
    """Both kinds of clients against the server at `url`."""
    spawn = multiprocessing.get_context("spawn")
    go, stop = spawn.Event(), spawn.Event()
    receiver, sender = spawn.Pipe(duplex=False)
    hostile = spawn.Process(target=run_hostile, args=(url, seed, go, stop, sender), daemon=True)
    hostile.start()
    try:
        quiet_s, hostile_s = asyncio.run(_alternate(url, seconds, go))
        stop.set()
        if not receiver.poll(120):
            raise RuntimeError("the hostile clients did not end")
        return Outcome(quiet_s, hostile_s, receiver.recv())
    finally:
        hostile.terminate()
        hostile.join()


def _line(name: str, seconds: list[float]) -> str:
    median, longest = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    return f"{name:24} {len(seconds):5} {median:9.1f} {longest:9.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcome = run(options.url, options.seconds, options.seed)
    print(f"{'':24} {'count':>5} {'median ms':>9} {'max ms':>9}")
    print(_line("first token, quiet", outcome.quiet_s))
    print(_line("first token, hostile", outcome.hostile_s))
    for name, seconds in outcome.replies.seconds.items():
        print(_line(name, seconds))
    print(f"ratio of the medians: {outcome.ratio:.2f} (at most {LIMIT:.0f})")
    print("\n".join(outcome.replies.wrong[:5]))
    return 1 if outcome.ratio > LIMIT or outcome.replies.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
