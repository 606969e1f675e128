# SPDX-License-Identifier: Apache-2.0
"""What streams over HTTP cost: tokens per second, latencies, CPU time of every process.

    python -m benchmarks.http_streams --streams 1,8,64,256,1024 --json s.json --plot s.png
    python -m benchmarks.http_streams --model benchmarks/qwen3_5_4b --streams 1,8,64,256
    python -m benchmarks.http_streams --streams 1024 --api-server-count 4 --rounds 4
    python -m benchmarks.http_streams --model benchmarks/qwen3_5_4b --streams 256 --rate 10,40

Without `--model` the engine's executor makes tokens at no cost (see `token_source`), at most one
step every `--step-ms`; scheduler, sockets, detokenisation and HTTP are the real ones. With it,
`vllm serve` serves that model with dummy weights, and the same load is then given to `LLM` in a
process of its own: the last columns are what HTTP leaves of it, and how long the engine alone takes
until all requests, given at once, have their first token. Further words `key=value` (JSON values)
are engine settings of both.

Every number of streams is a load of its own: `--rounds` requests per stream, at once or, for each
`--rate`, that many per second; then what the engine alone makes is left out. The exit status is 1
when a request failed, 3 when the clients were too busy for the figures to be the server's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import offline, starts
from benchmarks.api_overhead import stream_counts
from benchmarks.served_process import ServedProcess
from vllm.benchmarks.arrivals import Load, arrival_times
from vllm.benchmarks.client import DIALECTS, RequestOptions
from vllm.benchmarks.client_usage import limited_warning, usage_figures
from vllm.benchmarks.datasets import RandomPrompts
from vllm.benchmarks.load import allow_many_connections
from vllm.benchmarks.metrics import summarize
from vllm.benchmarks.outcome import Sample
from vllm.benchmarks.plot import require_matplotlib
from vllm.benchmarks.processes import LoadPlan, LoadResult, decide_num_processes, run_load

_START_S = 600.0
_BLOCK_SIZE = 16
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Point:
    """Figures of one number of streams. Latencies in milliseconds, CPU time in microseconds per
    output token; `rate` is of requests per second, infinite when all come at once; `client_busy` is
    that of the busiest process, `offline_*` are None without a model."""

    streams: int
    rate: float
    requests: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    api_processes: int
    api_us: float
    engine_us: float
    client_us: float
    client_processes: int
    client_busy: float
    client_limited: bool
    offline_tokens_per_s: float | None = None
    offline_first_ms: float | None = None

    @property
    def tokens_per_api_core(self) -> float:
        """Tokens per second for which the API processes would keep one core busy."""
        return 1e6 / self.api_us if self.api_us else float("inf")

    @property
    def ratio(self) -> float | None:
        """Tokens per second over HTTP, of those without."""
        return self.offline_tokens_per_s and self.tokens_per_s / self.offline_tokens_per_s


def table(points: Sequence[Point]) -> str:
    """One row per number of streams, as Markdown."""
    paced = any(np.isfinite(point.rate) for point in points)
    head = [
        "streams",
        *(["requests/s"] if paced else []),
        "tok/s",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "API processes",
    ]
    head += ["API CPU", "tok/s per API core", "engine CPU", "client CPU"]
    head += ["client processes", "busiest"]
    compared = any(point.ratio for point in points)
    head += ["offline tok/s", "HTTP / offline", "all first tokens, offline"] if compared else []
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for p in points:
        cells = [f"{p.streams}", *([f"{p.rate:g}"] if paced else []), f"{p.tokens_per_s:,.0f}"]
        cells += [f"{p.ttft_p50_ms:,.1f} ms", f"{p.ttft_p99_ms:,.1f} ms"]
        cells += [f"{p.itl_p50_ms:.2f} ms", f"{p.itl_p99_ms:.2f} ms", f"{p.api_processes}"]
        cells += [f"{p.api_us:.1f} µs", f"{p.tokens_per_api_core:,.0f}"]
        cells += [f"{us:.1f} µs" for us in (p.engine_us, p.client_us)]
        cells += [f"{p.client_processes}", f"{p.client_busy:.0%}"]
        if compared:
            cells += [f"{p.offline_tokens_per_s:,.0f}", f"{p.ratio:.2f}"]
            cells += [f"{p.offline_first_ms:,.1f} ms"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def plot(path: Path, points: Sequence[Point], title: str) -> None:
    """Tokens per second, both latencies and CPU time per token over the number of streams."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    rate, ttft, itl, cpu = figure.subplots(2, 2).flat
    streams = [p.streams for p in points]
    rate.plot(streams, [p.tokens_per_s for p in points], "o-", label="HTTP")
    if all(p.offline_tokens_per_s is not None for p in points):
        rate.plot(streams, [p.offline_tokens_per_s or 0 for p in points], "s--", label="offline")
    rate.set(title="Output", ylabel="tokens/s", yscale="log")
    for axis, name in ((ttft, "ttft"), (itl, "itl")):
        for percentile in ("p50", "p99"):
            values = [asdict(p)[f"{name}_{percentile}_ms"] for p in points]
            axis.plot(streams, values, "o-", label=percentile)
        axis.set(title=name.upper(), ylabel="ms", yscale="log")
    for part in ("api", "engine", "client"):
        cpu.plot(streams, [asdict(p)[f"{part}_us"] for p in points], "o-", label=part)
    cpu.set(title="CPU time", ylabel="µs per token", ylim=(0, None))
    for axis in (rate, ttft, itl, cpu):
        axis.set(xlabel="streams", xscale="log")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)


class Sweep:
    """Loads on one server. `tokenizer` makes prompts that the server counts as asked."""

    def __init__(self, server: ServedProcess, options: argparse.Namespace, tokenizer: Path) -> None:
        from vllm.tokenizers import get_tokenizer

        self._server = server
        self._options = options
        self._backend = "openai-chat" if options.chat else "openai"
        self._prompts = RandomPrompts(get_tokenizer(str(tokenizer)), options.seed)
        self._request = RequestOptions(
            model=options.served_name,
            url=server.url + DIALECTS[self._backend].path,
            extra={"ignore_eos": True, "temperature": 0.0},
        )

    def run(self, streams: int, rate: float) -> Point:
        """One load, after a short one that warms up what has to be."""
        options = self._options
        with self._server.watching(0.02):
            self._load(streams, streams, _WARM_UP_TOKENS, float("inf"))
        before = self._server.cpu()
        with self._server.watching(1.0):
            load = self._load(streams, streams * options.rounds, options.output, rate)
        spent = self._server.spent(before)
        failed = [o.error for o in load.outcomes if o.error is not None]
        if failed:
            raise SystemExit(f"error: {len(failed)} requests failed: {failed[0]}")
        if summary_tokens(load) != streams * options.rounds * options.output:
            raise SystemExit(f"error: {summary_tokens(load)} tokens came")
        summary = summarize(load.outcomes, load.duration_s, [50, 99])
        tokens = summary.total_output_tokens
        usage = usage_figures(load.clients, tokens)
        if usage["client_limited"]:
            print(limited_warning(load.clients))
        ttft, itl = summary.latencies["ttft"].percentiles, summary.latencies["itl"].percentiles
        return Point(
            streams=streams,
            rate=rate,
            requests=len(load.outcomes),
            output_tokens=tokens,
            seconds=load.duration_s,
            tokens_per_s=summary.output_throughput,
            ttft_p50_ms=ttft[50],
            ttft_p99_ms=ttft[99],
            itl_p50_ms=itl[50],
            itl_p99_ms=itl[99],
            api_processes=spent.num_api,
            api_us=spent.api_s * 1e6 / tokens,
            engine_us=spent.engine_s * 1e6 / tokens,
            client_us=usage["client_cpu_us_per_token"],
            client_processes=usage["client_processes"],
            client_busy=usage["client_max_busy"],
            client_limited=usage["client_limited"],
        )

    def _load(self, streams: int, count: int, output_len: int, rate: float) -> LoadResult:
        options = self._options
        samples = [
            Sample(*self._prompts.prompt([], options.prompt), output_len) for _ in range(count)
        ]
        times = arrival_times(Load(rate), count, options.seed)
        plan = LoadPlan(self._backend, self._request, samples, times, streams)
        number = options.client_processes and min(options.client_processes, streams)
        return run_load(plan, decide_num_processes(number, plan, rate), False)


def summary_tokens(load: LoadResult) -> int:
    """Output tokens of all requests."""
    return sum(outcome.output_len for outcome in load.outcomes)


@contextmanager
def free_server(options: argparse.Namespace) -> Iterator[Sweep]:
    """A server whose model costs nothing."""
    from benchmarks.token_source import train_tokenizer

    most = max(options.streams)
    # A template or a special token adds a few.
    length = options.prompt + options.output + 64
    command = ["-m", "benchmarks.token_source", "--step-ms", str(options.step_ms)]
    command += ["--max-num-seqs", str(most), "--max-model-len", str(length)]
    command += ["--num-blocks", str((most + 1) * (length // _BLOCK_SIZE + 2))]
    command += ["--api-server-count", str(options.api_server_count)]
    options.served_name = "tokens"
    with tempfile.TemporaryDirectory() as directory:
        train_tokenizer(Path(directory))
        with ServedProcess(command, _START_S) as server:
            yield Sweep(server, options, Path(directory))


@contextmanager
def model_server(options: argparse.Namespace) -> Iterator[Sweep]:
    """`vllm serve` with the settings of the offline run."""
    from benchmarks.token_source import servable

    with tempfile.TemporaryDirectory() as name:
        directory = servable(options.model, Path(name))
        settings = engine_settings(options)
        settings.pop("skip_tokenizer_init")
        settings.pop("model")
        command = ["-m", "vllm.entrypoints.cli.main", "serve", str(directory)]
        command += ["--host", "127.0.0.1", "--disable-uvicorn-access-log"]
        command += ["--served-model-name", "model", *starts.flags(settings)]
        if options.api_server_count > 1:
            command += ["--api-server-count", str(options.api_server_count)]
        options.served_name = "model"
        with ServedProcess(command, _START_S) as server:
            yield Sweep(server, options, directory)


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Those of `benchmarks.offline`, with this model and the words of the command line."""
    words = offline.parse_settings(options.settings)
    return offline.default_settings() | {"model": str(options.model)} | words


def offline_figures(
    settings: dict[str, Any], loads: Sequence[int], rounds: int, prompt: int, output: int
) -> list[dict[str, float]]:
    """For each number of streams what `LLM.generate` makes of it, by fields of `Point`."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(**settings)
    source = random.Random(0)
    vocab_size = llm.llm_engine.vllm_config.model_config.get_vocab_size()

    def seconds(count: int, tokens: int) -> float:
        ids = [[source.randrange(10, vocab_size) for _ in range(prompt)] for _ in range(count)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate([TokensPrompt(prompt_token_ids=i) for i in ids], params, use_tqdm=False)
        return time.perf_counter() - began

    found = []
    for streams in loads:
        seconds(streams, _WARM_UP_TOKENS)
        first = seconds(streams, 1)
        count = streams * rounds
        rate = count * output / seconds(count, output)
        found.append({"offline_tokens_per_s": rate, "offline_first_ms": 1e3 * first})
    return found


def with_offline(points: Sequence[Point], options: argparse.Namespace) -> list[Point]:
    """The same loads without HTTP, in a process that gives the GPU back."""
    loads = [point.streams for point in points]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:
        settings = engine_settings(options)
        job = pool.submit(
            offline_figures, settings, loads, options.rounds, options.prompt, options.output
        )
        return [Point(**asdict(p) | f) for p, f in zip(points, job.result(), strict=True)]


def _rates(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def _shown_rate(rate: float) -> float | str:
    """JSON has no infinity."""
    return rate if np.isfinite(rate) else "inf"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--streams", type=stream_counts, default=[1, 8, 64, 256], help="comma list")
    parser.add_argument("--prompt", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens per reply")
    parser.add_argument("--rounds", type=int, default=1, help="requests per stream")
    parser.add_argument(
        "--rate", type=_rates, default=[float("inf")], help="requests per second, comma list"
    )
    parser.add_argument("--chat", action="store_true", help="the chat route, not completions")
    parser.add_argument("--model", type=Path, help="directory of a model; default: a free one")
    parser.add_argument("--step-ms", type=float, default=0.0, help="least time of a free step")
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--client-processes", type=int, help="default: as many as needed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="picture, FILE.png (needs matplotlib)")
    options = parser.parse_args(words)
    if options.settings and not options.model:
        parser.error("engine settings need --model: the free one has its own")
    if options.model and options.step_ms:
        parser.error("--step-ms is of the free model; a real one takes the time it takes")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    if options.plot:
        require_matplotlib()
    allow_many_connections()
    points = []
    with (model_server if options.model else free_server)(options) as sweep:
        for streams in options.streams:
            for rate in options.rate:
                points.append(sweep.run(streams, rate))
                print(table(points[-1:]), flush=True)
    if options.model and not np.isfinite(options.rate).any():
        points = with_offline(points, options)
    print(table(points))
    if options.json:
        shown = {key: str(value) if isinstance(value, Path) else value
                 for key, value in vars(options).items()}  # fmt: skip
        shown["rate"] = [_shown_rate(rate) for rate in options.rate]
        result = {
            "options": shown,
            "points": [
                asdict(p)
                | {"rate": _shown_rate(p.rate), "ratio": p.ratio}
                | {"tokens_per_api_core": p.tokens_per_api_core}
                for p in points
            ],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(options.plot, points, f"{options.model or 'free model'}, HTTP")
    return 3 if any(point.client_limited for point in points) else 0


if __name__ == "__main__":
    sys.exit(main())
