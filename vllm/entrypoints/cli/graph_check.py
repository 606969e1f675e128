# SPDX-License-Identifier: Apache-2.0
"""`vllm graph-check`: what in a model's source keeps its steps from being captured."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.types import CLISubcommand, CommandError
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.result_file import check_file

if TYPE_CHECKING:
    from vllm.compilation.graph_safety.report import Report
    from vllm.compilation.graph_safety.targets import Progress


class GraphCheckCommand(CLISubcommand):
    """Prints a table; writes JSON and SARIF."""

    description = (
        "Find what keeps a step from being captured in a CUDA graph: host reads of device values, "
        "shapes and branches that depend on data, replaced buffers. Reads source, and runs a "
        "model's steps on the CPU with made-up weights, each captured once and replayed. Needs "
        "neither weights nor a GPU. Exit status: 0 nothing found, 1 hazards found (or an error)."
    )

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        parser.add_argument(
            "targets",
            nargs="+",
            metavar="MODEL|FILE",
            help="A model's path or repository, or Python files: FILE.py, or FILE.py:NAME for one "
            "class or function of it. Files are imported.",
        )
        group = parser.add_argument_group("Graph check", "How to show what is found.")
        group.add_argument(
            "--json", type=Path, metavar="OUT", help="Also write the report as JSON to this file."
        )
        group.add_argument(
            "--sarif", type=Path, metavar="OUT", help="Also write it as SARIF 2.1.0 to this file."
        )
        group.add_argument(
            "--steps",
            type=int,
            default=64,
            metavar="N",
            help="Steps of a model that are run, on every rank: on a CPU captured by recording, on "
            "GPUs (at least 512 on each) in graphs; replayed, and compared with eager ones. 0: "
            "source only.",
        )
        EngineArgs.add_cli_args(parser)
        parser.set_defaults(model=None)

    def run(self, args: argparse.Namespace) -> int:
        if args.model is not None:
            raise VLLMValidationError("give the model as MODEL, not as --model", "model")
        if args.steps < 0:
            raise VLLMValidationError(f"--steps {args.steps}: give 0 or more", "steps")
        for name in ("json", "sarif"):
            check_file(name, getattr(args, name))
        if importlib.util.find_spec("triton") is None:
            raise CommandError("graph-check reads the GPU's kernels: install triton (vllm[cuda])")
        from vllm.compilation.graph_safety.report import as_json, as_sarif, as_table

        with tqdm(unit=" functions and steps", desc="graph-check", leave=False) as bar:

            def progress(name: str) -> None:
                bar.update()

            reports = [_check(target, args, progress) for target in args.targets]
        for file, content in ((args.json, as_json), (args.sarif, as_sarif)):
            if file is not None:
                file.write_text(json.dumps(content(reports), indent=2) + "\n", encoding="utf-8")
        print(as_table(reports))
        return 0 if all(report.is_clean for report in reports) else 1


def _check(target: str, args: argparse.Namespace, progress: Progress) -> Report:
    from vllm.compilation.graph_safety import targets
    from vllm.compilation.graph_safety.model_steps import with_steps
    from vllm.compilation.graph_safety.source_pass import source_pass

    if target.partition(":")[0].endswith(".py"):
        return targets.check_file(Path(target), progress)
    own = argparse.Namespace(**{**vars(args), "model": target})
    try:
        engine = EngineArgs.from_cli_args(own)
        with source_pass(engine, progress, beside=args.steps > 0) as source:

            def stepped(name: str) -> None:
                source.poll()
                progress(name)

            return with_steps(source.report, engine, args.steps, stepped)
    except ValueError as error:
        raise VLLMValidationError(str(error)) from error
