# SPDX-License-Identifier: Apache-2.0
"""`vllm bench ...`: each benchmark is a module of `vllm.benchmarks`."""

import argparse
import importlib

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser


class BenchCommand(CLISubcommand):
    """Runs the benchmark of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._module = importlib.import_module(f"vllm.benchmarks.{name.removeprefix('bench ')}")
        self.description = self._module.DESCRIPTION

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        self._module.add_cli_args(parser)

    def run(self, args: argparse.Namespace) -> int:
        return self._module.main(args)
