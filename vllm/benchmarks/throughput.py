# SPDX-License-Identifier: Apache-2.0
"""`vllm bench throughput`: how fast an offline engine works off many requests."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from vllm.benchmarks.datasets import DatasetArgs, load_samples
from vllm.benchmarks.offline import add_engine_args, check_length, make_llm, save_json
from vllm.benchmarks.outcome import Sample
from vllm.utils.dataclass_flags import add_dataclass_flags, from_namespace
from vllm.utils.options import config, option
from vllm.utils.result_file import check_file

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DESCRIPTION = "Measure how fast an offline engine works off many requests."


@config
class ThroughputArgs:
    """How the requests are run."""

    backend: Literal["vllm", "vllm-chat"] = option(
        default="vllm", help="vllm: the prompt as it is; vllm-chat: through the chat template."
    )
    n: int = option(default=1, help="Answers per prompt.")
    num_warmups: int = option(default=0, help="Requests before the measured ones.")
    disable_detokenize: bool = option(default=False, help="Do not turn tokens into text.")
    output_json: str | None = option(default=None, help="File for the result.")


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """Declare the flags."""
    add_dataclass_flags(parser, ThroughputArgs, "Throughput")
    add_dataclass_flags(parser, DatasetArgs, "Dataset")
    add_engine_args(parser)


def main(namespace: argparse.Namespace) -> int:
    """Run the benchmark."""
    args = from_namespace(ThroughputArgs, namespace)
    check_file("output_json", args.output_json)
    dataset = from_namespace(DatasetArgs, namespace)
    result, prompt_tokens, output_tokens = run(args, dataset, namespace)
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{output_tokens / result['elapsed_time']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt_tokens}")
    print(f"Total num output tokens:  {output_tokens}")
    save_json(args.output_json, result)
    return 0


def run(
    args: ThroughputArgs, dataset: DatasetArgs, namespace: argparse.Namespace
) -> tuple[dict[str, Any], int, int]:
    """The result, and the prompt and output tokens in it."""
    llm = make_llm(namespace)
    samples = load_samples(dataset, llm.get_tokenizer(), namespace.seed)
    longest = max(samples, key=lambda s: (s.prompt_len or 0) + s.output_len)
    check_length(llm, longest.prompt_len or 0, longest.output_len)

    def generate(chosen: Sequence[Sample], show_progress: bool) -> list[RequestOutput]:
        params = [_params(args, sample) for sample in chosen]
        if args.backend == "vllm-chat":
            chats = [[{"role": "user", "content": sample.prompt}] for sample in chosen]
            return llm.chat(chats, params, use_tqdm=show_progress)
        return llm.generate([s.prompt for s in chosen], params, use_tqdm=show_progress)

    if args.num_warmups:
        generate([samples[i % len(samples)] for i in range(args.num_warmups)], False)
    began = time.perf_counter()
    outputs = generate(samples, True)
    seconds = time.perf_counter() - began
    prompt_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    output_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    total = prompt_tokens + output_tokens
    result = {
        "elapsed_time": seconds,
        "num_requests": len(samples),
        "total_num_tokens": total,
        "requests_per_second": len(samples) / seconds,
        "tokens_per_second": total / seconds,
    }
    return result, prompt_tokens, output_tokens


def _params(args: ThroughputArgs, sample: Sample) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=sample.output_len,
        detokenize=not args.disable_detokenize,
    )
