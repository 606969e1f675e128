# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve`: load on a running OpenAI server."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import math
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from vllm.benchmarks import result as results
from vllm.benchmarks.arrivals import arrival_times
from vllm.benchmarks.client import DIALECTS, RequestOptions
from vllm.benchmarks.client_usage import limited_warning, usage_figures
from vllm.benchmarks.connection import ConnectionPool, Endpoint
from vllm.benchmarks.datasets import DatasetArgs, load_samples
from vllm.benchmarks.load import (
    RETRY_S,
    Share,
    ShareSender,
    allow_many_connections,
    tls_context,
    wait_until_ready,
)
from vllm.benchmarks.metrics import summarize
from vllm.benchmarks.plot import plot, require_matplotlib
from vllm.benchmarks.processes import LoadPlan, LoadResult, decide_num_processes, run_load
from vllm.benchmarks.serve_args import ServeArgs
from vllm.benchmarks.speculation import SpeculationCounts, speculation_result
from vllm.entrypoints.cli.types import CommandError
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.utils.dataclass_flags import add_dataclass_flags, from_namespace
from vllm.utils.result_file import check_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)

DESCRIPTION = "Send requests to a running server and report its latency and throughput."
#: different errors that are printed
_SHOWN_ERRORS = 5
#: exit status of `--fail-on-busy-client`
_BUSY_CLIENT = 3
#: of requests that are not part of the load
_TIMEOUT = httpx.Timeout(60.0, read=None)


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """Declare the flags."""
    add_dataclass_flags(parser, ServeArgs, "Serve")
    add_dataclass_flags(parser, DatasetArgs, "Dataset")


def main(namespace: argparse.Namespace) -> int:
    """Run the benchmark.

    1 when no request succeeded, 3 when `--fail-on-busy-client` is given and a client process was
    too busy to measure the server.
    """
    args = from_namespace(ServeArgs, namespace)
    dataset = from_namespace(DatasetArgs, namespace)
    _check_places(args)
    if args.plot:
        require_matplotlib()
    allow_many_connections()
    result = benchmark(args, dataset)
    if not result["completed"]:
        return 1
    return _BUSY_CLIENT if args.fail_on_busy_client and result["client_limited"] else 0


@dataclass(frozen=True)
class _Target:
    """What `--model` and `--tokenizer` come to."""

    model: str
    tokenizer: str

    @classmethod
    def find(cls, args: ServeArgs, http: httpx.Client) -> _Target:
        """Ask the server where the flags do not say; raises `CommandError` if it has no answer."""
        model = args.model or args.served_model_name
        root = None
        if model is None:
            card = _first_model(args, http)
            model, root = str(card["id"]), card.get("root")
        return cls(args.model or model, args.tokenizer or str(root or model))


def _first_model(args: ServeArgs, http: httpx.Client) -> dict[str, Any]:
    """What `GET /v1/models` lists first; waits for a server that is still starting."""
    url = args.url() + "/v1/models"
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            reply = (http.get(url, headers=args.headers())).raise_for_status()
            card: dict[str, Any] = reply.json()["data"][0]
            return card
        except httpx.TransportError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise CommandError(f"cannot reach {url}: {error}") from error
            time.sleep(RETRY_S)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise CommandError(f"{url} names no model: {error}; use --model") from error


def benchmark(args: ServeArgs, dataset: DatasetArgs) -> dict[str, Any]:
    """Prepare, warm up, measure, print and save; returns the result."""
    endpoint = Endpoint(args.endpoint_url())
    _warn_of_proxy(endpoint)
    context = tls_context(not args.insecure) if endpoint.tls else None
    # The load goes straight to the server, so all else does, too.
    with httpx.Client(timeout=_TIMEOUT, verify=context or False, trust_env=False) as http:
        target = _Target.find(args, http)
        samples = load_samples(dataset, _tokenizer(args, dataset, target), args.seed)
        options = RequestOptions(
            model=args.served_model_name or target.model,
            url=args.endpoint_url(),
            headers=args.headers(),
            extra=args.body(),
            request_id_prefix=args.request_id_prefix,
        )
        times = arrival_times(args.load(), len(samples), args.seed)
        plan = LoadPlan(
            args.backend, options, samples, times, args.max_concurrency, not args.insecure
        )
        num_processes = decide_num_processes(args.client_processes, plan, args.load().peak_rate)
        asyncio.run(_prepare(args, plan, ConnectionPool(endpoint, context)))
        _profile(args, http, "start")
        before = _speculation(args, http)
        load = run_load(plan, num_processes, not args.disable_tqdm)
        speculation = speculation_result(before, _speculation(args, http))
        _profile(args, http, "stop")
    return _report(args, target, load, speculation)


async def _prepare(args: ServeArgs, plan: LoadPlan, pool: ConnectionPool) -> None:
    """The check and the warm-up, as far as they were asked for."""
    dialect = DIALECTS[plan.backend]
    if args.ready_check_timeout_sec > 0:
        timeout_s = args.ready_check_timeout_sec
        await wait_until_ready(pool, dialect, plan.options, plan.samples[0], timeout_s)
    chosen = [plan.samples[i % len(plan.samples)] for i in range(args.num_warmups)]
    share = Share(chosen, [0.0] * len(chosen), range(len(chosen)), args.max_concurrency)
    sender = ShareSender(pool, dialect, plan.options, share)
    epoch = time.perf_counter()
    await sender.send(epoch, lambda: None)
    pool.close()
    for outcome in sender.outcomes(epoch):
        if outcome.error is not None:
            raise CommandError(f"a warm-up request failed: {outcome.error}")


def _warn_of_proxy(endpoint: Endpoint) -> None:
    proxy = urllib.request.getproxies().get("https" if endpoint.tls else "http")
    if proxy and not urllib.request.proxy_bypass(endpoint.host):
        logger.warning(
            "the environment names the proxy %s for this server; requests do not use it", proxy
        )


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


def _speculation(args: ServeArgs, http: httpx.Client) -> SpeculationCounts | None:
    """None when the server has no metrics to read."""
    try:
        reply = http.get(args.url() + "/metrics", headers=args.headers())
    except httpx.HTTPError:
        return None
    try:
        return None if reply.is_error else SpeculationCounts.parse(reply.text)
    except ValueError:  # not the Prometheus format
        return None


def _profile(args: ServeArgs, http: httpx.Client, action: str) -> None:
    if args.profile:
        reply = http.post(f"{args.url()}/{action}_profile", headers=args.headers())
        if reply.is_error:
            raise CommandError(
                f"--profile: POST /{action}_profile answered {reply.status_code}; this server "
                "does not profile"
            )


def _report(
    args: ServeArgs,
    target: _Target,
    load: LoadResult,
    speculation: dict[str, Any],
) -> dict[str, Any]:
    outcomes = load.outcomes
    summary = summarize(outcomes, load.duration_s, args.percentiles(), args.goodput_levels())
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
        **usage_figures(load.clients, summary.total_output_tokens),
        **speculation,
    }
    if args.ramp_up_strategy is not None:
        result["ramp_up_strategy"] = args.ramp_up_strategy
        result["ramp_up_start_rps"] = args.ramp_up_start_rps
        result["ramp_up_end_rps"] = args.ramp_up_end_rps
    print(results.table(result, summary, args.shown_metrics()), flush=True)
    # Clients whose requests all fail at once are busy with nothing else.
    if result["client_limited"] and result["completed"]:
        print(limited_warning(load.clients))
    errors = Counter(o.error for o in outcomes if o.error is not None)
    for error, count in errors.most_common(_SHOWN_ERRORS):
        print(f"{count} failed: {error}")
    if args.saves:
        saved = {**result, **results.details(outcomes)} if args.save_detailed else result
        path = _result_path(args, target, result)
        results.save(path, saved, args.append_result)
        print(f"saved: {path}")
    if args.plot:
        title = f"{target.model}, {result['request_rate']} requests/s"
        plot(args.plot, outcomes, title, result.get("spec_decode_per_position_acceptance_rates"))
        print(f"saved: {args.plot}")
    return result


def _check_places(args: ServeArgs) -> None:
    """Raise `VLLMValidationError` where a result could not be written; makes `--result-dir`."""
    check_file("plot", args.plot)
    if not args.saves:
        return
    folder = Path(args.result_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VLLMValidationError(
            f"--result-dir {folder}: {error.strerror}", "result_dir", args.result_dir
        ) from None
    check_file("result_filename", folder / (args.result_filename or "x.json"))


def _result_path(args: ServeArgs, target: _Target, result: dict[str, Any]) -> Path:
    name = args.result_filename
    if name is None:
        concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
        head = f"{args.label or args.backend}-{result['request_rate']}qps{concurrency}"
        name = f"{head}-{target.model.rstrip('/').rsplit('/', 1)[-1]}-{result['date']}.json"
    return Path(args.result_dir or ".") / name
