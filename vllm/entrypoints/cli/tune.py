# SPDX-License-Identifier: Apache-2.0
"""`vllm tune`: measures launch parameters on this GPU and writes them as a file."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from vllm.entrypoints.cli.types import CLISubcommand, CommandError
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser, add_dataclass_flags
from vllm.utils.dataclass_flags import from_namespace
from vllm.utils.options import config, option

if TYPE_CHECKING:
    from vllm.kernels.triton.tile_files import Tile
    from vllm.kernels.tuning.shapes import KernelShapes
    from vllm.kernels.tuning.spaces import Space
    from vllm.kernels.tuning.sweep import Result


@config
class TuneArgs:
    """What is tuned, and where the result goes; MODEL, before the flags, gives sizes."""

    tensor_parallel_size: PositiveInt = option(
        default=1,
        aliases=("-tp",),
        help="Ranks of MODEL: kernels get the sizes of one of them.",
    )
    only: list[str] | None = option(
        default=None,
        help="Tables to tune, by part of the name (e.g. attention_decode.256). Default: all.",
    )
    output: str | None = option(
        default=None,
        help="File to write. Default: named for the GPU, in VLLM_TUNED_CONFIG_FOLDER, else in the "
        "current directory.",
    )
    list_tables: bool = option(
        default=False,
        name="list",
        help="Show the names of all tables, and the sizes they are timed at, and stop.",
    )


class TuneCommand(CLISubcommand):
    """Times the alternatives of every table; what wins is written, the rest stays as it is."""

    description = (
        "Measure the kernels' launch parameters on this GPU and write them to a file. Serving "
        "reads it from the folder that VLLM_TUNED_CONFIG_FOLDER names; nothing is tuned at start. "
        "With MODEL kernels are timed at the sizes of its layers; its weights are not read."
    )

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        parser.add_argument(
            "model_tag",
            nargs="?",
            metavar="MODEL",
            help="Model path or repository, of which only config.json is read. Tables that none of "
            "its kernels reads are left out. Default: all tables, at sizes of a 4B hybrid and a "
            "35B mixture.",
        )
        add_dataclass_flags(parser, TuneArgs, "Tuning")

    def run(self, namespace: argparse.Namespace) -> int:
        args = from_namespace(TuneArgs, namespace)
        chosen = choose(args.only, namespace.model_tag, args.tensor_parallel_size)
        if args.list_tables:
            lines = (f"{space.name:<26}{'; '.join(space.sizes)}" for space in chosen)
            print("\n".join(lines))
            return 0
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            raise CommandError("launch parameters belong to a GPU, and none is visible")
        from vllm.kernels.tuning.sweep import tune

        output = None if args.output is None else Path(args.output)
        path = tune(chosen, output, lambda result: print(describe(result), flush=True))
        print(f"written to {path}")
        return 0


def choose(only: list[str] | None, model: str | None, ranks: int) -> list[Space]:
    """The tables to tune. Those that no kernel of `model` reads are named on stderr.

    Raises CommandError where none is left; VLLMValidationError for a model, or a number of ranks,
    that cannot be served, and for ranks of no model.
    """
    from vllm.kernels.tuning.shapes import DEFAULT
    from vllm.kernels.tuning.spaces import spaces

    if model is None and ranks > 1:
        raise VLLMValidationError("give the MODEL that the ranks share", "tensor_parallel_size")
    known = spaces(DEFAULT if model is None else model_shapes(model, ranks))
    named = [s for s in known if not only or any(part in s.name for part in only)]
    if not named:
        names = ", ".join(space.name for space in known)
        raise CommandError(f"--only {' '.join(only or ())} names no table of: {names}")
    unread = ", ".join(space.name for space in named if not space.workloads)
    chosen = [space for space in named if space.workloads]
    if not chosen:
        raise CommandError(f"{model} has no kernel that reads {unread}")
    if unread:
        print(f"left out, as no kernel of {model} reads them: {unread}", file=sys.stderr)
    return chosen


def model_shapes(model: str, ranks: int) -> KernelShapes:
    """Of the kernels of one of `ranks` tensor-parallel ranks, from the model's configuration.

    Raises VLLMValidationError for what cannot be served.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.kernels.tuning.shapes import shapes_of
    from vllm.model_executor.model_outline import models_on_meta

    args = EngineArgs(model=model, tensor_parallel_size=ranks, skip_tokenizer_init=True)
    try:
        _, models = models_on_meta(args.create_engine_config(), ranks)
    except ValueError as error:
        raise VLLMValidationError(str(error), "model") from error
    return shapes_of(module for built in models for module in built.modules())


def describe(result: Result) -> str:
    """One line of the report."""
    name = f"{result.space.name:<22}"
    if result.best == result.before:
        kept = f"stays {show(result.before)}"
        return f"{name} {kept} ({result.num_timed} alternatives are not faster)"
    gain = "the old one fails" if math.isinf(result.speedup) else f"{result.speedup:.3f} x as fast"
    return f"{name} {show(result.before)} -> {show(result.best)} ({gain})"


def show(tile: Tile) -> str:
    """A tile in few characters."""
    return f"{tile.rows}x{tile.columns}, {tile.num_warps} warps, {tile.num_stages} stages"
