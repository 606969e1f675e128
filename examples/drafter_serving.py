# SPDX-License-Identifier: Apache-2.0
"""Serve a target with its drafter, send it held-out prompts, and read off what was accepted."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import httpx
from demo import free_port, running
from reply_loops import loop_start
from tqdm import tqdm

from vllm.benchmarks.speculation import SpeculationCounts, speculation_result

#: requests at a time
_IN_FLIGHT = 8


@dataclass(frozen=True)
class Measured:
    """`rates`: share of the rounds in which the draft at each position was accepted; `length`:
    tokens per round. `same_texts` of `texts` are those of the target without a drafter.

    `loops` of the replies' tokens, as a share, are in loops (`reply_loops`); `length_before_loops`
    is that of the same replies stopped where theirs begins, None if none has tokens before it."""

    rates: list[float]
    length: float
    rounds: int
    same_texts: int
    texts: int
    loops: float
    length_before_loops: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        lines = [f"{'position':>10} {'accepted':>9}"]
        lines += [f"{place:>10} {rate:>9.3f}" for place, rate in enumerate(self.rates, 1)]
        lines += [
            f"acceptance length {self.length:.2f} over {self.rounds:,} rounds",
            f"{self.loops:.0%} of the tokens are in loops"
            + (f"; before them {before:.2f}" if (before := self.length_before_loops) else ""),
            f"{self.same_texts} of {self.texts} texts are those of the model without drafts",
        ]
        return "\n".join(lines)


def prompts_of(held_out: Path) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and the tokens that the target said after it, of every sample; its loss mask says
    which is which."""
    rows = datasets.load_from_disk(str(held_out)).with_format(None)
    for row in rows:
        start = row["loss_mask"].index(1)
        yield row["input_ids"][:start], row["input_ids"][start:]


def serve_command(model: str, drafter: Path, port: int, memory_bytes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"),
        *("--dtype", "float32", "--kv-cache-memory-bytes", str(memory_bytes)),
        # Acceptance is that of all drafts, also where fewer would pay more.
        *("--speculative-config", json.dumps({"model": str(drafter), "full_width": True})),
    ]


def measure(
    model: str, drafter: Path, held_out: Path, max_tokens: int, memory_bytes: int
) -> Measured:
    """Start the server, have it continue every sample of `held_out`, and stop it."""
    samples = list(prompts_of(held_out))
    prompts = [prompt for prompt, _ in samples]
    loops = [loop_start(said) for _, said in samples]
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="vllm-drafter-") as scratch:
        command = serve_command(model, drafter, port, memory_bytes)
        with running(command, base, Path(scratch) / "server.log"):
            before = _counts(base)
            texts = _complete(base, prompts, [max_tokens] * len(prompts))
            between = _counts(base)
            _complete(base, prompts, [max(1, loop) for loop in loops])
            found = speculation_result(before, between)
            without_loops = speculation_result(between, _counts(base))
    if not found:
        raise SystemExit("error: the server drafted nothing")
    pairs = zip(texts, samples, strict=True)
    return Measured(
        rates=found["spec_decode_per_position_acceptance_rates"],
        length=found["spec_decode_acceptance_length"],
        rounds=found["spec_decode_num_drafts"],
        # The dataset has no row for the last token.
        same_texts=sum(text[: len(said)] == said for text, (_, said) in pairs),
        texts=len(samples),
        loops=1 - sum(loops) / sum(len(said) for _, said in samples),
        length_before_loops=without_loops.get("spec_decode_acceptance_length"),
    )


def _counts(base: str) -> SpeculationCounts:
    return SpeculationCounts.parse(httpx.get(f"{base}/metrics", timeout=60).text)


def _complete(base: str, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    def one(prompt: list[int], max_tokens: int) -> list[int]:
        body = {"model": "target", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        reply = client.post("/v1/completions", json=body)
        if reply.status_code != 200:
            raise SystemExit(f"error: the server answered {reply.status_code}: {reply.text}")
        said: list[int] = reply.json()["choices"][0]["token_ids"]
        return said

    with httpx.Client(base_url=base, timeout=600) as client, ThreadPoolExecutor(_IN_FLIGHT) as pool:
        answers = pool.map(one, prompts, lengths)
        return list(tqdm(answers, desc="serving", total=len(prompts), unit="request"))
