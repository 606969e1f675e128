# SPDX-License-Identifier: Apache-2.0
"""`vllm tune`: measures launch parameters on this GPU and writes them as a file."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.entrypoints.cli.types import CLISubcommand, CommandError
from vllm.utils.argparse_utils import FlexibleArgumentParser, add_dataclass_flags
from vllm.utils.dataclass_flags import from_namespace
from vllm.utils.options import config, option

if TYPE_CHECKING:
    from vllm.kernels.triton.tile_files import Tile
    from vllm.kernels.tuning.sweep import Result


@config
class TuneArgs:
    """What is tuned, and where the result goes."""

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
        default=False, name="list", help="Show the names of all tables and stop."
    )


class TuneCommand(CLISubcommand):
    """Times the alternatives of every table; what wins is written, the rest stays as it is."""

    description = (
        "Measure the kernels' launch parameters on this GPU and write them to a file. Serving "
        "reads it from the folder that VLLM_TUNED_CONFIG_FOLDER names; nothing is tuned at start."
    )

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        add_dataclass_flags(parser, TuneArgs, "Tuning")

    def run(self, namespace: argparse.Namespace) -> int:
        from vllm.kernels.tuning.spaces import spaces

        args = from_namespace(TuneArgs, namespace)

        chosen = [
            space
            for space in spaces()
            if not args.only or any(part in space.name for part in args.only)
        ]
        if not chosen:
            names = ", ".join(space.name for space in spaces())
            raise CommandError(f"--only {' '.join(args.only or ())} names no table of: {names}")
        if args.list_tables:
            print("\n".join(space.name for space in chosen))
            return 0
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            raise CommandError("launch parameters belong to a GPU, and none is visible")
        from vllm.kernels.tuning.sweep import tune

        output = None if args.output is None else Path(args.output)
        path = tune(chosen, output, lambda result: print(describe(result), flush=True))
        print(f"written to {path}")
        return 0


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
