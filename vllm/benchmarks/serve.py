# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve`: load on a running OpenAI server."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import math
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from vllm.benchmarks import result as results
from vllm.benchmarks.arrivals import arrival_times
from vllm.benchmarks.client import DIALECTS, RequestOptions
from vllm.benchmarks.datasets import DatasetArgs, Sample, load_samples
from vllm.benchmarks.load import RETRY_S, send_all, wait_until_ready
from vllm.benchmarks.metrics import summarize
from vllm.benchmarks.outcome import Outcome
from vllm.benchmarks.plot import plot, require_matplotlib
from vllm.benchmarks.serve_args import ServeArgs
from vllm.benchmarks.speculation import SpeculationCounts, speculation_result
from vllm.entrypoints.cli.types import CommandError
from vllm.exceptions import VLLMValidationError
from vllm.utils.dataclass_flags import add_dataclass_flags, from_namespace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.utils.argparse_utils import FlexibleArgumentParser

DESCRIPTION = "Send requests to a running server and report its latency and throughput."
#: different errors that are printed
_SHOWN_ERRORS = 5
#: connecting is quick; a token may take long
_TIMEOUT = httpx.Timeout(60.0, read=None, pool=None)


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """Declare the flags."""
    add_dataclass_flags(parser, ServeArgs, "Serve")
    add_dataclass_flags(parser, DatasetArgs, "Dataset")


def main(namespace: argparse.Namespace) -> int:
    """Run the benchmark; 1 when no request succeeded."""
    args = from_namespace(ServeArgs, namespace)
    dataset = from_namespace(DatasetArgs, namespace)
    if args.plot:
        require_matplotlib()
    _allow_many_connections()
    result = asyncio.run(benchmark(args, dataset))
    return 0 if result["completed"] else 1


def _allow_many_connections() -> None:
    """Every request in flight is an open file, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True)
class _Target:
    """What `--model` and `--tokenizer` come to."""

    model: str
    tokenizer: str

    @classmethod
    async def find(cls, args: ServeArgs, http: httpx.AsyncClient) -> _Target:
        """Ask the server where the flags do not say; raises `CommandError` if it has no answer."""
        model = args.model or args.served_model_name
        root = None
        if model is None:
            card = await _first_model(args, http)
            model, root = str(card["id"]), card.get("root")
        return cls(args.model or model, args.tokenizer or str(root or model))


async def _first_model(args: ServeArgs, http: httpx.AsyncClient) -> dict[str, Any]:
    """What `GET /v1/models` lists first; waits for a server that is still starting."""
    url = args.url() + "/v1/models"
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            reply = (await http.get(url, headers=args.headers())).raise_for_status()
            card: dict[str, Any] = reply.json()["data"][0]
            return card
        except httpx.TransportError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise CommandError(f"cannot reach {url}: {error}") from error
            await asyncio.sleep(RETRY_S)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise CommandError(f"{url} names no model: {error}; use --model") from error


async def benchmark(args: ServeArgs, dataset: DatasetArgs) -> dict[str, Any]:
    """Prepare, warm up, measure, print and save; returns the result."""
    dialect = DIALECTS[args.backend]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, verify=not args.insecure) as http:
        target = await _Target.find(args, http)
        samples = load_samples(dataset, _tokenizer(args, dataset, target), args.seed)
        options = RequestOptions(
            model=args.served_model_name or target.model,
            url=args.endpoint_url(),
            headers=args.headers(),
            extra=args.body(),
            request_id_prefix=args.request_id_prefix,
        )
        if args.ready_check_timeout_sec > 0:
            timeout_s = args.ready_check_timeout_sec
            await wait_until_ready(http, dialect, options, samples[0], timeout_s)
        if args.num_warmups:
            await _warm_up(args, http, options, samples)
        await _profile(args, http, "start")
        before = await _speculation(args, http)
        times = arrival_times(args.load(), len(samples), args.seed)
        outcomes, duration = await send_all(
            http, dialect, options, samples, times, args.max_concurrency, not args.disable_tqdm
        )
        speculation = speculation_result(before, await _speculation(args, http))
        await _profile(args, http, "stop")
    return _report(args, target, outcomes, duration, speculation)


def _tokenizer(
    args: ServeArgs, dataset: DatasetArgs, target: _Target
) -> PreTrainedTokenizerBase | None:
    """Custom prompts need none: the server counts them."""
    if dataset.dataset_name == "custom" and args.tokenizer is None:
        return None
    from vllm.tokenizers import get_tokenizer

    try:
        return get_tokenizer(
            target.tokenizer,
            tokenizer_mode=args.tokenizer_mode,
            trust_remote_code=args.trust_remote_code,
        )
    except Exception as error:
        raise VLLMValidationError(
            f"no tokenizer at {target.tokenizer!r} ({error}); name one with --tokenizer"
        ) from error


async def _warm_up(
    args: ServeArgs, http: httpx.AsyncClient, options: RequestOptions, samples: Sequence[Sample]
) -> None:
    chosen = [samples[i % len(samples)] for i in range(args.num_warmups)]
    times = arrival_times(args.load(), 1, args.seed).repeat(len(chosen))
    dialect = DIALECTS[args.backend]
    outcomes, _ = await send_all(
        http, dialect, options, chosen, times, args.max_concurrency, show_progress=False
    )
    for outcome in outcomes:
        if outcome.error is not None:
            raise CommandError(f"a warm-up request failed: {outcome.error}")


async def _speculation(args: ServeArgs, http: httpx.AsyncClient) -> SpeculationCounts | None:
    """None when the server has no metrics to read."""
    try:
        reply = await http.get(args.url() + "/metrics", headers=args.headers())
    except httpx.HTTPError:
        return None
    return None if reply.is_error else SpeculationCounts.parse(reply.text)


async def _profile(args: ServeArgs, http: httpx.AsyncClient, action: str) -> None:
    if args.profile:
        reply = await http.post(f"{args.url()}/{action}_profile", headers=args.headers())
        if reply.is_error:
            raise CommandError(
                f"--profile: POST /{action}_profile answered {reply.status_code}; this server "
                "does not profile"
            )


def _report(
    args: ServeArgs,
    target: _Target,
    outcomes: Sequence[Outcome],
    duration: float,
    speculation: dict[str, Any],
) -> dict[str, Any]:
    summary = summarize(outcomes, duration, args.percentiles(), args.goodput_levels())
    now = datetime.datetime.now()
    rate: float | str = args.request_rate if math.isfinite(args.request_rate) else "inf"
    result: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": target.model,
        "tokenizer_id": target.tokenizer,
        "num_prompts": len(outcomes),
        **args.result_metadata(),
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **results.figures(summary),
        **speculation,
    }
    if args.ramp_up_strategy is not None:
        result["ramp_up_strategy"] = args.ramp_up_strategy
        result["ramp_up_start_rps"] = args.ramp_up_start_rps
        result["ramp_up_end_rps"] = args.ramp_up_end_rps
    print(results.table(result, summary, args.shown_metrics()), flush=True)
    errors = Counter(o.error for o in outcomes if o.error is not None)
    for error, count in errors.most_common(_SHOWN_ERRORS):
        print(f"{count} failed: {error}")
    if args.save_result or args.append_result or args.save_detailed:
        saved = {**result, **results.details(outcomes)} if args.save_detailed else result
        path = _result_path(args, target, result)
        results.save(path, saved, args.append_result)
        print(f"saved: {path}")
    if args.plot:
        plot(args.plot, outcomes, f"{target.model}, {result['request_rate']} requests/s")
        print(f"saved: {args.plot}")
    return result


def _result_path(args: ServeArgs, target: _Target, result: dict[str, Any]) -> Path:
    name = args.result_filename
    if name is None:
        concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
        head = f"{args.label or args.backend}-{result['request_rate']}qps{concurrency}"
        name = f"{head}-{target.model.rstrip('/').rsplit('/', 1)[-1]}-{result['date']}.json"
    return Path(args.result_dir or ".") / name
