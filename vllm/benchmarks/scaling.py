# SPDX-License-Identifier: Apache-2.0
"""`vllm bench scaling`: what several devices gain, by how the model is laid out over them."""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from tqdm import tqdm

from vllm.benchmarks.offline import (
    add_engine_args,
    check_length,
    make_llm,
    random_prompts,
    save_json,
)
from vllm.benchmarks.plot import require_matplotlib
from vllm.benchmarks.scaling_plot import plot
from vllm.entrypoints.cli.explain_layout_text import rates_line
from vllm.entrypoints.cli.serve import choose_model
from vllm.entrypoints.cli.text_table import table
from vllm.exceptions import VLLMValidationError
from vllm.utils.dataclass_flags import add_dataclass_flags, from_namespace
from vllm.utils.options import config, flag_name, option
from vllm.utils.result_file import check_file

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.core.explain_layout import LayoutReport, Rates
    from vllm.v1.core.layout_cost import Layout

DESCRIPTION = (
    "Measure layouts of a model over devices: the throughput of a batch, the speed of one request "
    "and prefills alone, with an offline engine each, beside what vllm explain predicts."
)
_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
)
#: for some of the replicas, whose speed is not that of all
_PARTS = ("data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank")
_COLUMNS = (
    "layout", "devices", "batch tok/s", "ratio", "predicted", "1 request tok/s", "ratio",
    "predicted", "prefill tok/s", "ratio", "predicted",
)  # fmt: skip


@config
class ScalingArgs:
    """Which layouts, and what each of them runs."""

    layouts: str = option(
        default="tp1,tp2,pp2,dp2",
        help="Layouts, separated by commas: sizes of tensor, pipeline and data parallelism, as "
        "tp1, tp2, pp2, dp2, tp2pp2dp2, and ep for whole experts per rank, as tp4ep. All others "
        "are compared with the first.",
    )
    input_len: PositiveInt = option(default=128, help="Tokens per prompt.")
    output_len: PositiveInt = option(default=128, help="Tokens generated per prompt.")
    batch_size: PositiveInt = option(default=32, help="Requests of the batch, of all replicas.")
    num_iters_warmup: NonNegativeInt = option(
        default=1, help="Batches, single requests and prefills before the measured ones."
    )
    num_iters: PositiveInt = option(
        default=3,
        help="Measured batches, single requests and prefills of the batch; the median counts.",
    )
    decode_device: str | None = option(
        default=None,
        help="Device of the prediction, as of `vllm explain`; by default the GPU at hand. Without "
        "figures of the device nothing is predicted.",
    )
    decode_link: str | None = option(
        default=None,
        help="What connects the devices in the prediction, as of `vllm explain`; by default what "
        "connects such devices.",
    )
    output_json: str | None = option(default=None, help="File for the result.")
    plot: str | None = option(default=None, help="File for a picture (needs `vllm[plot]`).")


@dataclass(frozen=True)
class Speed:
    """`seconds` of each measured run, tokens/s of their median, and how many times the first
    layout's that is; `predicted_...`: the same of decode steps, or of prefills, None where nothing
    is predicted."""

    seconds: list[float]
    tokens_per_s: float
    ratio: float
    predicted_tokens_per_s: float | None = None
    predicted_ratio: float | None = None


@dataclass(frozen=True)
class Run:
    """One layout: a batch, one request, and prompts of a batch of which one token is asked."""

    layout: str
    devices: int
    batch: Speed
    request: Speed
    prefill: Speed


@dataclass(frozen=True)
class Figures:
    """Of a batch, of one request and of prefills: seconds of the measured runs, or predicted
    tokens/s."""

    batch: list[float]
    request: list[float]
    prefill: list[float]


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """Declare the flags."""
    add_dataclass_flags(parser, ScalingArgs, "Scaling")
    add_engine_args(parser)
    # Every run has the same prompts; finding them in the cache is not what is measured.
    parser.set_defaults(enable_prefix_caching=False)


def main(namespace: argparse.Namespace) -> int:
    """Run the benchmark."""
    from vllm.v1.core.layout_cost import Layout

    args = from_namespace(ScalingArgs, namespace)
    if any(vars(namespace)[name] not in (1, False) for name in _SIZES):
        raise VLLMValidationError("sizes of layouts are given with --layouts", "layouts")
    _check_places(namespace)
    for name in ("output_json", "plot"):
        check_file(name, getattr(args, name))
    if args.plot is not None:
        require_matplotlib()
    namespace.model = choose_model(namespace.model_tag, namespace.model)
    try:
        layouts = [Layout.parse(text.strip()) for text in args.layouts.split(",")]
        rates = _rates(args)
        vllm_config = _config(args, namespace, layouts[0])
        reports = [_report(args, vllm_config, layout, rates) for layout in layouts]
    except ValueError as error:
        raise VLLMValidationError(str(error), "layouts") from error
    predictions = None if rates is None else [_prediction(args, one) for one in reports]
    measured = _measure_all(args, namespace, layouts)
    runs = compare(args, layouts, measured, predictions)
    note = _note(rates, layouts, vllm_config)
    print("\n".join([*table(_COLUMNS, [_row(run) for run in runs]), note]))
    result = {"model": namespace.model, "prediction": note, **asdict(args)}
    save_json(args.output_json, result | {"layouts": [asdict(run) for run in runs]})
    if args.plot is not None:
        title = f"{namespace.model}: {args.batch_size} requests, one, and prefills"
        plot(
            args.plot,
            title,
            [run.layout for run in runs],
            {
                "Tokens/s of the batch": [
                    (run.batch.ratio, run.batch.predicted_ratio) for run in runs
                ],
                "Tokens/s of one request": [
                    (run.request.ratio, run.request.predicted_ratio) for run in runs
                ],
                "Prompt tokens/s": [
                    (run.prefill.ratio, run.prefill.predicted_ratio) for run in runs
                ],
            },
        )
    return 0


def _check_places(namespace: argparse.Namespace) -> None:
    """`VLLMValidationError` for flags by which this host has a part of a layout."""
    for name in _PARTS:
        if getattr(namespace, name) is not None:
            flag = flag_name(name)
            raise VLLMValidationError(
                f"{flag}: layouts are measured with all their replicas; leave out {flag}", name
            )
    if namespace.nnodes > 1:
        raise VLLMValidationError(
            f"--nnodes {namespace.nnodes}: layouts of one host are measured; leave it out, and "
            "measure a server on several with `vllm bench serve`",
            "nnodes",
        )


# ---- prediction ----------------------------------------------------------------------------------


def _rates(args: ScalingArgs) -> Rates | None:
    """None for a device without figures; ValueError for names that are not known."""
    from vllm.platforms import current_platform
    from vllm.v1.core.decode_cost import device_speed, speed_of_device
    from vllm.v1.core.explain_layout import Rates
    from vllm.v1.core.link_speed import link_speed

    if args.decode_device is None:
        device = speed_of_device(current_platform.get_device_name())
    else:
        device = device_speed(args.decode_device)
    link = None if args.decode_link is None else link_speed(args.decode_link)
    return None if device is None else Rates(device, link)


def _config(args: ScalingArgs, namespace: argparse.Namespace, layout: Layout) -> VllmConfig:
    """An engine's of this layout."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.batch_defaults import UsageContext

    engine = EngineArgs.from_cli_args(_with_layout(namespace, layout))
    try:
        vllm_config = engine.create_engine_config(UsageContext.LLM_CLASS)
    except VLLMValidationError as error:
        raise ValueError(f"layout {layout.name}: {error}") from error
    check_length(vllm_config, args.input_len, args.output_len)
    return vllm_config


def _report(
    args: ScalingArgs, vllm_config: VllmConfig, layout: Layout, rates: Rates | None
) -> LayoutReport:
    """Also without rates: ValueError for a layout that an engine would refuse."""
    from vllm.v1.core.explain_layout import Rates, explain_layout
    from vllm.v1.core.layout_plan import Budget
    from vllm.v1.core.link_speed import LINKS

    per_replica = -(-args.batch_size // layout.dp)
    context = args.input_len + (1 + args.output_len) // 2
    any_rates = rates or Rates(link=LINKS["NVLink4"])
    report = explain_layout(
        vllm_config, layout, Budget(), any_rates, per_replica, context, prompt=args.input_len
    )
    if not report.is_possible:
        raise ValueError(f"layout {layout.name}: {report.refused or report.too_large}")
    return report


def _prediction(args: ScalingArgs, report: LayoutReport) -> Figures:
    assert report.asked is not None and report.one is not None, "a possible layout has costs"
    assert report.prefill is not None
    return Figures(
        [args.batch_size / report.asked.seconds],
        [1 / report.one.seconds],
        [report.prefill.tokens_per_s],
    )


def _note(rates: Rates | None, layouts: list[Layout], vllm_config: VllmConfig) -> str:
    if rates is None:
        return "Nothing is predicted: no figures of this device are known; give --decode-device."
    links = (rates.link_for(layout, vllm_config) for layout in layouts)
    return rates_line(rates.device, next((link for link in links if link is not None), None))


# ---- measurement ---------------------------------------------------------------------------------


def _with_layout(namespace: argparse.Namespace, layout: Layout) -> argparse.Namespace:
    changed = copy.copy(namespace)
    vars(changed).update(layout.flags)
    return changed


def _measure_all(
    args: ScalingArgs, namespace: argparse.Namespace, layouts: list[Layout]
) -> list[Figures]:
    """Of one engine after the other."""
    each = 1 + 3 * (args.num_iters_warmup + args.num_iters)
    found = []
    with tqdm(total=len(layouts) * each, unit="run", dynamic_ncols=True) as bar:
        for layout in layouts:
            bar.set_description(f"{layout.name}: start")
            llm = make_llm(_with_layout(namespace, layout))
            try:
                bar.update()
                found.append(_measure(args, namespace, llm, bar, layout.name))
            finally:
                llm.shutdown()
    return found


def _measure(
    args: ScalingArgs, namespace: argparse.Namespace, llm: LLM, bar: Any, name: str
) -> Figures:
    from vllm import SamplingParams

    seconds = []
    for what, size, length in (
        ("batch", args.batch_size, args.output_len),
        ("1 request", 1, args.output_len),
        ("prefill", args.batch_size, 1),
    ):
        bar.set_description(f"{name}: {what}")
        params = SamplingParams(
            temperature=1.0, ignore_eos=True, max_tokens=length, detokenize=False
        )
        prompts = random_prompts(llm, size, args.input_len, namespace.seed)
        runs = []
        for _ in range(args.num_iters_warmup + args.num_iters):
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            runs.append(time.perf_counter() - began)
            bar.update()
        seconds.append(runs[args.num_iters_warmup :])
    return Figures(*seconds)


# ---- result --------------------------------------------------------------------------------------


def compare(
    args: ScalingArgs,
    layouts: list[Layout],
    measured: list[Figures],
    predicted: list[Figures] | None,
) -> list[Run]:
    """Each layout beside the first."""
    guesses = predicted or [Figures([], [], []) for _ in layouts]
    batches = _speeds(
        args.batch_size * args.output_len,
        [one.batch for one in measured],
        [one.batch for one in guesses],
    )
    requests = _speeds(
        args.output_len, [one.request for one in measured], [one.request for one in guesses]
    )
    prefills = _speeds(
        args.batch_size * args.input_len,
        [one.prefill for one in measured],
        [one.prefill for one in guesses],
    )
    return [
        Run(layout.name, layout.devices, *speeds)
        for layout, *speeds in zip(layouts, batches, requests, prefills, strict=True)
    ]


def _speeds(tokens: int, seconds: list[list[float]], predicted: list[list[float]]) -> list[Speed]:
    """Of all layouts; each has one predicted figure, or none has any."""
    rates = [tokens / float(np.median(one)) for one in seconds]
    speeds = [Speed(one, rate, rate / rates[0]) for one, rate in zip(seconds, rates, strict=True)]
    return [
        replace(
            speed,
            predicted_tokens_per_s=guess[0] if guess else None,
            predicted_ratio=guess[0] / predicted[0][0] if guess else None,
        )
        for speed, guess in zip(speeds, predicted, strict=True)
    ]


def _row(run: Run) -> list[str]:
    cells = [run.layout, str(run.devices)]
    for speed in (run.batch, run.request, run.prefill):
        guess = speed.predicted_ratio
        cells += [f"{speed.tokens_per_s:,.1f}", f"{speed.ratio:.2f}x"]
        cells.append("" if guess is None else f"{guess:.2f}x")
    return cells
