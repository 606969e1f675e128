# SPDX-License-Identifier: Apache-2.0
"""`vllm bench startup`: its own flags, and those of `vllm serve`, which go to the servers."""

import argparse
from collections.abc import Sequence

from vllm.benchmarks import startup
from vllm.entrypoints.cli.serve import ServeCommand
from vllm.entrypoints.cli.types import CLISubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.dataclass_flags import add_dataclass_flags, flag_specs


class StartupCommand(CLISubcommand):
    """Splits the command line in its own part and the server's."""

    description = startup.DESCRIPTION

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        add_dataclass_flags(parser, startup.StartupArgs, "Startup")
        ServeCommand().add_arguments(parser)

    def parse(self, parser: FlexibleArgumentParser, argv: list[str]) -> argparse.Namespace:
        """A mistake in the server's flags is found here, not in the first start."""
        namespace = parser.parse_args(argv)
        namespace.serve_flags = server_part(argv)
        return namespace

    def run(self, args: argparse.Namespace) -> int:
        return startup.main(args)


def server_part(argv: "Sequence[str]") -> list[str]:
    """`argv` without the benchmark's own flags."""
    own = FlexibleArgumentParser(add_help=False)
    for spec in flag_specs(startup.StartupArgs):
        own.add_argument(spec.flag)
    return own.parse_known_args(list(argv))[1]
