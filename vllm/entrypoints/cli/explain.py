# SPDX-License-Identifier: Apache-2.0
"""`vllm explain`: what a configuration allocates, without weights or a GPU."""

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.engine.batch_defaults import UsageContext
from vllm.entrypoints.cli.types import CLISubcommand
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.dataclass_flags import human_int
from vllm.utils.options import flag_name
from vllm.v1.core.explain import Explanation

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT])(i?)B")


def byte_count(text: str) -> int:
    """`100GB` (10^11), `96GiB`, `500MB`, or a count with the suffixes of other flags."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return human_int(text)
    number, prefix, binary = match.groups()
    return human_int(number + (prefix.upper() + "i" if binary else prefix.lower()))


def token_counts(text: str) -> list[int]:
    """`12,1k,32k` -> `[12, 1000, 32000]`."""
    return [human_int(part) for part in text.split(",")]


class ExplainCommand(CLISubcommand):
    """Prints tables, JSON or a picture."""

    description = (
        "Say what a configuration allocates: bytes per kind of state, the page plan, what requests "
        "cost, what fits, what is wasted, what a changed flag would do, and what each rank of a "
        "layout holds, sends and takes. Reads config.json only."
    )

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        parser.add_argument("model_tag", metavar="MODEL", help="Model path or repository.")
        group = parser.add_argument_group("Explain", "What to explain, and how to show it.")
        group.add_argument(
            "--lengths",
            type=token_counts,
            metavar="N,N,...",
            help="Request lengths in tokens, prompt and output together (default: 12,1k,32k, as "
            "far as --max-model-len allows).",
        )
        group.add_argument(
            "--memory",
            type=byte_count,
            metavar="BYTES",
            help="Memory of the arena, such as 100GB or 96GiB (default: what the engine would use "
            "here; --num-gpu-blocks-override gives it in pages).",
        )
        group.add_argument(
            "--device-memory",
            type=byte_count,
            metavar="BYTES",
            help="Memory of the device; the arena gets --gpu-memory-utilization of it, less the "
            "weights and --reserved-memory.",
        )
        group.add_argument(
            "--reserved-memory",
            type=byte_count,
            default=0,
            metavar="BYTES",
            help="What activations and the driver take of --device-memory; the engine measures it "
            "at its start (default: 0).",
        )
        group.add_argument(
            "--decode-batch",
            type=human_int,
            default=32,
            metavar="N",
            help="Sequences of the decode steps whose cost is predicted (default: 32).",
        )
        group.add_argument(
            "--decode-device",
            default="H200",
            metavar="NAME",
            help="Device of the prediction: A100, H100, H200, B200 or L40S, or bytes and FLOPs per "
            "second and microseconds per kernel, as 3.35e12,989e12,1.5 (default: H200).",
        )
        group.add_argument(
            "--decode-link",
            metavar="NAME",
            help="What connects the devices of a layout: NVLink3, NVLink4, NVLink5, PCIe4 or "
            "PCIe5, or bytes per second in each direction and microseconds per exchange, as "
            "450e9,7 (default: that of --decode-device).",
        )
        group.add_argument(
            "--devices",
            type=human_int,
            metavar="N",
            help="Instead, compare all layouts of the model on N devices (-tp, -pp, -dp, and -ep "
            "for experts) for requests of the longest of --lengths (default: --max-model-len): "
            "what fits, and which is predicted to be best.",
        )
        group.add_argument("--no-what-ifs", action="store_true", help="Only this configuration.")
        group.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
        group.add_argument(
            "--plot", type=Path, metavar="FILE", help="Also draw a picture (needs vllm[plot])."
        )
        EngineArgs.add_cli_args(parser)
        parser.set_defaults(model=None)

    def run(self, args: argparse.Namespace) -> int:
        if args.model is not None:
            raise VLLMValidationError("give the model as MODEL, not as --model", "model")
        if args.memory is not None and args.device_memory is not None:
            raise VLLMValidationError(
                "--memory is the arena's, --device-memory the device's: give one of them", "memory"
            )
        _check_amounts(args)
        args.model = args.model_tag
        config = EngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        try:
            text = _report(args, config) if args.devices is None else _comparison(args, config)
        except ValueError as error:
            raise VLLMValidationError(str(error)) from error
        print(text)
        return 0


def _check_amounts(args: argparse.Namespace) -> None:
    if args.reserved_memory and args.device_memory is None:
        raise VLLMValidationError(
            "--reserved-memory is a part of --device-memory: give both, or leave it out",
            "reserved_memory",
        )
    if args.devices is not None and args.nnodes > 1:
        raise VLLMValidationError(
            "--devices compares layouts of one host: leave out --nnodes, or give the sizes of one "
            "layout (-tp, -pp) instead of --devices",
            "nnodes",
            args.nnodes,
        )
    for name, least in (("reserved_memory", 0), ("decode_batch", 1)):
        value = getattr(args, name)
        if value < least:
            raise VLLMValidationError(f"{flag_name(name)} {value}: at least {least}", name, value)


def _report(args: argparse.Namespace, config: "VllmConfig") -> str:
    """Of the configuration."""
    from vllm.entrypoints.cli.explain_text import render
    from vllm.v1.core.decode_cost import device_speed
    from vllm.v1.core.explain import Budget, explain
    from vllm.v1.core.explain_decode import DecodeBatch
    from vllm.v1.core.link_speed import link_speed

    report = explain(
        config,
        Budget(args.memory, args.device_memory, args.reserved_memory),
        args.lengths,
        what_ifs=not args.no_what_ifs,
        decode_batch=DecodeBatch(args.decode_batch, device_speed(args.decode_device)),
        link=None if args.decode_link is None else link_speed(args.decode_link),
    )
    if args.plot is not None:
        plot(report, args.plot)
    return json.dumps(dataclasses.asdict(report), indent=2) if args.json else render(report)


def _comparison(args: argparse.Namespace, config: "VllmConfig") -> str:
    """Of all layouts of `--devices`."""
    from vllm.entrypoints.cli.explain_layout_text import render_comparison
    from vllm.v1.core.decode_cost import device_speed
    from vllm.v1.core.explain_layout import Rates, compare_layouts
    from vllm.v1.core.layout_plan import Budget
    from vllm.v1.core.link_speed import link_speed

    if args.plot is not None:
        raise VLLMValidationError("--plot draws one configuration: leave out --devices", "plot")
    link = None if args.decode_link is None else link_speed(args.decode_link)
    report = compare_layouts(
        config,
        args.devices,
        Budget(args.memory, args.device_memory, args.reserved_memory),
        Rates(device_speed(args.decode_device), link),
        args.decode_batch,
        max(args.lengths) if args.lengths else None,
    )
    if args.json:
        return json.dumps(dataclasses.asdict(report), indent=2)
    return render_comparison(report)


def plot(report: Explanation, file: Path) -> None:
    """Draw `report` into `file`, in the format its name says.

    Raises `VLLMValidationError` without matplotlib and for a format it does not write.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise VLLMValidationError("--plot needs matplotlib: pip install 'vllm[plot]'") from None
    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    uses, changes = figure.subplots(1, 2, width_ratios=(1, 1.2))
    figure.suptitle(f"{report.architecture}, {report.memory.arena_bytes / 1e9:,.4g} GB of state")
    _draw_uses(uses, report)
    _draw_changes(changes, report)
    try:
        figure.savefig(file, dpi=120)
    except ValueError as error:
        raise VLLMValidationError(f"--plot {file}: {error}") from None


def _draw_uses(axes: Any, report: Explanation) -> None:
    parts = [
        (group.kind, [use.state_bytes[i] for use in report.uses])
        for i, group in enumerate(report.groups)
    ]
    parts += [
        (waste.what, [use.wastes[i].num_bytes for use in report.uses])
        for i, waste in enumerate(report.uses[0].wastes)
    ]
    parts.append(("too little for one more", [use.left_bytes for use in report.uses]))
    labels = [f"{use.num_tokens:,}" for use in report.uses]
    bottom = [0.0] * len(labels)
    for what, sizes in parts:
        if any(sizes):
            heights = [size / 1e9 for size in sizes]
            axes.bar(labels, heights, bottom=bottom, label=what)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_title("A full arena")
    axes.set_xlabel("tokens per request")
    axes.set_ylabel("GB")
    axes.figure.legend(fontsize="small", loc="outside lower left", ncols=4)


def _draw_changes(axes: Any, report: Explanation) -> None:
    changes = [c for c in report.what_ifs if c.sequences and c.note != "as configured"]
    names = ["as configured", *(change.flag for change in changes)]
    offset = 0.8 / len(report.requests)
    for i, cost in enumerate(report.requests):
        ratios = [1.0, *(c.sequences[i] / max(cost.sequences, 1) for c in changes)]
        places = [row + i * offset for row in range(len(names))]
        axes.barh(places, ratios, height=offset, label=f"{cost.num_tokens:,} tokens")
    axes.set_yticks([row + 0.4 - offset / 2 for row in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_title("Requests at once, relative to this configuration")
    axes.legend(fontsize="small")
