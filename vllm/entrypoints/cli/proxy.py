# SPDX-License-Identifier: Apache-2.0
"""`vllm proxy`: one address before engines for prompts and engines for answers."""

import argparse

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.entrypoints.proxy.args import ProxyArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser, add_dataclass_flags
from vllm.utils.dataclass_flags import from_namespace


class ProxyCommand(CLISubcommand):
    """Runs until it is told to stop."""

    description = (
        "Route completions and chats: one server computes the prompt, another fetches its state "
        "and answers. Servers that do not answer are left out until they do."
    )

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        add_dataclass_flags(parser, ProxyArgs, "Proxy")

    def run(self, args: argparse.Namespace) -> int:
        # Importing what serves takes longer than to find mistakes in the flags.
        given = from_namespace(ProxyArgs, args)
        from vllm.entrypoints.proxy.server import serve

        return serve(given)
