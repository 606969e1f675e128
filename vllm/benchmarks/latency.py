# SPDX-License-Identifier: Apache-2.0
"""`vllm bench latency`: how long one batch takes, offline."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import PositiveInt
from tqdm import trange

from vllm.benchmarks.offline import (
    add_engine_args,
    check_length,
    make_llm,
    random_prompts,
    save_json,
)
from vllm.utils.dataclass_flags import add_dataclass_flags, from_namespace
from vllm.utils.options import config, option
from vllm.utils.result_file import check_file

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DESCRIPTION = "Measure how long an offline engine takes for one batch."
PERCENTILES = (10, 25, 50, 75, 90, 99)


@config
class LatencyArgs:
    """The batch and how often it runs."""

    input_len: PositiveInt = option(default=32, help="Tokens per prompt.")
    output_len: PositiveInt = option(default=128, help="Tokens generated per prompt.")
    batch_size: PositiveInt = option(default=8, help="Prompts.")
    n: PositiveInt = option(default=1, help="Answers per prompt; beams with --use-beam-search.")
    use_beam_search: bool = option(default=False, help="Search beams instead of sampling.")
    num_iters_warmup: int = option(default=10, help="Runs before the measured ones.")
    num_iters: PositiveInt = option(default=30, help="Measured runs.")
    disable_detokenize: bool = option(default=False, help="Do not turn tokens into text.")
    output_json: str | None = option(default=None, help="File for the result.")


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """Declare the flags."""
    add_dataclass_flags(parser, LatencyArgs, "Latency")
    add_engine_args(parser)
    # Every run has the same prompts; finding them in the cache is not what is measured.
    parser.set_defaults(enable_prefix_caching=False)


def main(namespace: argparse.Namespace) -> int:
    """Run the benchmark."""
    args = from_namespace(LatencyArgs, namespace)
    check_file("output_json", args.output_json)
    seconds = run(args, namespace)
    result = summarize(seconds)
    print(f"Avg latency: {result['avg_latency']} seconds")
    for percentile, value in result["percentiles"].items():
        print(f"{percentile}% percentile latency: {value} seconds")
    save_json(args.output_json, result)
    return 0


def run(args: LatencyArgs, namespace: argparse.Namespace) -> list[float]:
    """Seconds of each measured run."""
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    llm = make_llm(namespace)
    check_length(llm, args.input_len, args.output_len)
    prompts = random_prompts(llm, args.batch_size, args.input_len, namespace.seed)
    params = SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=args.output_len,
        detokenize=not args.disable_detokenize,
    )
    beams = BeamSearchParams(beam_width=args.n, max_tokens=args.output_len, ignore_eos=True)

    def generate() -> None:
        if args.use_beam_search:
            llm.beam_search(prompts, beams)
        else:
            llm.generate(prompts, params, use_tqdm=False)

    for _ in trange(args.num_iters_warmup, desc="Warm-up", dynamic_ncols=True):
        generate()
    seconds = []
    for _ in trange(args.num_iters, desc="Measuring", dynamic_ncols=True):
        began = time.perf_counter()
        generate()
        seconds.append(time.perf_counter() - began)
    return seconds


def summarize(seconds: list[float]) -> dict[str, Any]:
    """The keys of the result file."""
    return {
        "avg_latency": float(np.mean(seconds)),
        "latencies": seconds,
        "percentiles": {str(p): float(np.percentile(seconds, p)) for p in PERCENTILES},
    }
