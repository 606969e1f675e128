# SPDX-License-Identifier: Apache-2.0
"""First tokens of an engine that fetches a prompt's state from another one.

    python -m benchmarks.disaggregation                                     # two GPUs, or a CPU
    python -m benchmarks.disaggregation --connector NixlConnector --lengths 512,8192

Two servers: one computes prompts, the other fetches their state and answers. For every length, over
`--repeats` prompts of random tokens, the medians of

- prompt: the producer's time for the prompt;
- fetched: from the request at the consumer to its first token, and that without the transfer, by
  the consumer's own `kv_p2p_receive_time`; of this, how long it waited until the state was ready
  at the producer, read its bytes, and checked them;
- computed: another prompt, which it computes itself;
- hit: that one again, which its own prefix cache then has;

how many answers are those of the producer when it answers alone, from what it kept, and through
which memory of the consumer the state passed, by its own decisions. With two GPUs each server has
one, the model has the dimensions of Qwen3.5-4B and random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from tqdm import tqdm

from benchmarks.served_process import ServedProcess
from benchmarks.token_source import servable
from vllm.distributed.kv_transfer.kv_connector.v1.p2p_connector import STAGED

ROOT = Path(__file__).resolve().parent.parent
ON_GPUS = torch.cuda.device_count() >= 2
_START_S = 300.0
#: parts of `Times` -> what the consumer counts
_COUNTED = {
    "transfer": "vllm:kv_p2p_receive_time_total",
    "wait": "vllm:kv_p2p_wait_time_total",
    "read": "vllm:kv_p2p_read_time_total",
    "seal": "vllm:kv_p2p_seal_time_total",
}


@dataclass(frozen=True)
class Times:
    """Of one prompt, in milliseconds; `same`: the answer is that of one engine."""

    prompt: float
    fetched: float
    transfer: float
    wait: float
    read: float
    seal: float
    hit: float
    computed: float
    same: bool


@dataclass(frozen=True)
class Row:
    """Medians for one length; `same` of `prompts` answers are those of one engine."""

    length: int
    prompts: int
    same: int
    prompt_ms: float
    fetched_ms: float
    transfer_ms: float
    hit_ms: float
    computed_ms: float
    #: parts of the transfer; of figures that are older than these, None
    wait_ms: float | None = None
    read_ms: float | None = None
    seal_ms: float | None = None
    through: str = "host memory"

    @property
    def after_transfer(self) -> float:
        """First token once the state is there, in first tokens of a local prefix hit."""
        return (self.fetched_ms - self.transfer_ms) / self.hit_ms


#: fields of `Row` -> what a table calls them
_COLUMNS = {
    "prompt_ms": "prompt",
    "fetched_ms": "fetched",
    "transfer_ms": "of it transfer",
    "wait_ms": "wait",
    "read_ms": "read",
    "seal_ms": "seal",
    "hit_ms": "hit",
    "computed_ms": "computed",
}


def table(rows: Sequence[Row]) -> str:
    """One row per length, as Markdown; the parts of transfers where they are known."""
    named = {
        name: title
        for name, title in _COLUMNS.items()
        if all(getattr(row, name) is not None for row in rows)
    }
    head = ["tokens", *named.values(), "after the transfer / hit", "same answers"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [f"{row.length:,}", *(f"{getattr(row, name):,.1f} ms" for name in named)]
        cells += [f"{row.after_transfer:.2f}", f"{row.same} of {row.prompts}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class Pair:
    """Clients of the two servers."""

    def __init__(self, producer: ServedProcess, consumer: ServedProcess, answer: int) -> None:
        self._producer = httpx.Client(base_url=producer.url, timeout=120, trust_env=False)
        self._consumer = httpx.Client(base_url=consumer.url, timeout=120, trust_env=False)
        self._answer = answer

    def run(self, prompt: list[int], other: list[int]) -> Times:
        """Both prompts are new to both servers."""
        began = time.perf_counter()
        handed = self._body(prompt, 1) | {"kv_transfer_params": {"do_remote_decode": True}}
        reply = _ok(self._producer.post("/v1/completions", json=handed)).json()
        prompt_ms = 1e3 * (time.perf_counter() - began)
        parameters = {"kv_transfer_params": reply["kv_transfer_params"]}
        before = self._counted()
        fetched_ms, answer = self._stream(self._body(prompt) | parameters)
        parts = {name: 1e3 * (now - before[name]) for name, now in self._counted().items()}
        computed_ms, _ = self._stream(self._body(other))
        hit_ms, _ = self._stream(self._body(other))
        alone = self._body(prompt) | {"return_token_ids": True}
        choice = _ok(self._producer.post("/v1/completions", json=alone)).json()["choices"][0]
        same = choice["token_ids"] == answer
        return Times(
            prompt=prompt_ms,
            fetched=fetched_ms,
            **parts,
            hit=hit_ms,
            computed=computed_ms,
            same=same,
        )

    def _body(self, prompt: list[int], tokens: int | None = None) -> dict[str, Any]:
        most = self._answer if tokens is None else tokens
        sampling = {"max_tokens": most, "temperature": 0, "ignore_eos": True}
        return {"model": "model", "prompt": prompt} | sampling

    def _stream(self, body: dict[str, Any]) -> tuple[float, list[int]]:
        """Milliseconds to the first token, and all tokens."""
        body = body | {"stream": True, "return_token_ids": True}
        began, first_ms = time.perf_counter(), None
        tokens: list[int] = []
        with self._consumer.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(reply.read().decode())
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(event["error"])
                new = [i for choice in event["choices"] for i in choice["token_ids"] or []]
                if new and first_ms is None:
                    first_ms = 1e3 * (time.perf_counter() - began)
                tokens += new
        assert first_ms is not None, "an answer without tokens"
        return first_ms, tokens

    def through(self) -> str:
        """The memory of the consumer that state passes through."""
        records = _ok(self._consumer.get("/decisions")).json()
        [chosen] = [one["chosen"] for one in records if one["what"] == STAGED]
        return str(chosen)

    def _counted(self) -> dict[str, float]:
        """Seconds that the consumer has spent on fetching so far, and on the parts of it."""
        lines = _ok(self._consumer.get("/metrics")).text.splitlines()
        return {
            part: sum(float(line.split()[-1]) for line in lines if line.startswith(name))
            for part, name in _COUNTED.items()
        }


def _ok(reply: httpx.Response) -> httpx.Response:
    if reply.status_code != 200:
        raise RuntimeError(reply.text)
    return reply


def serve_command(args: argparse.Namespace, model: Path, role: str) -> list[str]:
    """What starts a server of that role."""
    extra = {"host": "127.0.0.1", "port": 0, "staging_bytes": args.staging_mb * 10**6}
    if args.staging_device is not None:
        extra["staging_device"] = args.staging_device
    transfer = {
        "kv_connector": args.connector,
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
    command = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"]
    command += ["--served-model-name", "model", "--load-format", args.load_format]
    command += ["--max-model-len", str(max(args.lengths) + args.answer_tokens + 1)]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    return command


def measure(args: argparse.Namespace) -> list[Row]:
    source = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [source.randrange(10, 250) for _ in range(length)]

    rows = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = servable(args.model, Path(name))
        starting = [
            ServedProcess(
                serve_command(args, model, role),
                _START_S,
                # Its own first: memory of a GPU that a process does not see cannot be mapped.
                os.environ | ({"CUDA_VISIBLE_DEVICES": gpus} if ON_GPUS else {}),
            )
            for gpus, role in (("0,1", "kv_producer"), ("1,0", "kv_consumer"))
        ]
        producer, consumer = (stack.enter_context(server) for server in starting)
        pair = Pair(producer, consumer, args.answer_tokens)
        for length in tqdm(args.lengths, desc="lengths"):
            runs = [
                pair.run(tokens(length), tokens(length))
                for _ in range(args.repeats + 1)  # the first turn is a rehearsal
            ][1:]
            rows.append(replace(row_of(length, runs), through=pair.through()))
    return rows


def row_of(length: int, runs: Sequence[Times]) -> Row:
    """Medians of the runs."""
    fields = ("prompt", "fetched", *_COUNTED, "hit", "computed")
    medians = {f"{field}_ms": median(asdict(run)[field] for run in runs) for field in fields}
    return Row(length, len(runs), sum(run.same for run in runs), **medians)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    small = ROOT / "examples" / "models" / "tiny-qwen3_5-code"
    add = parser.add_argument
    add("--connector", default="P2pConnector", choices=("P2pConnector", "NixlConnector"))
    add("--model", type=Path, default=ROOT / "benchmarks" / "qwen3_5_4b" if ON_GPUS else small)
    add("--load-format", default="dummy" if ON_GPUS else "auto")
    add("--lengths", type=_lengths, default=[512, 2048, 8192] if ON_GPUS else [64, 256, 900])
    add("--answer-tokens", type=int, default=32)
    add("--repeats", type=int, default=5)
    add(
        "--staging-mb", type=int, default=4_000 if ON_GPUS else 100, help="Staging memory per side."
    )
    add("--staging-device", choices=("auto", "cuda", "cpu"), help="Of NixlConnector.")
    add("--json", type=Path, help="file for the figures")
    return parser


def _lengths(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    args = make_parser().parse_args()
    rows = measure(args)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
