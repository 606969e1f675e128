# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`."""

import argparse

from vllm.entrypoints.cli.types import CLISubcommand
from vllm.entrypoints.openai.cli_args import DEFAULT_MODEL, make_arg_parser
from vllm.logger import init_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)


class ServeCommand(CLISubcommand):
    """Starts the HTTP server."""

    description = "Serve a model over HTTP with the OpenAI API."

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        add_model_argument(parser)
        make_arg_parser(parser)
        parser.set_defaults(model=None)

    def run(self, args: argparse.Namespace) -> int:
        from vllm.entrypoints.openai.run_server import run_server

        if args.model_tag is None and args.model is not None:
            logger.warning("`vllm serve %s` is the usual form of --model", args.model)
        args.model = choose_model(args.model_tag, args.model)
        return run_server(args)


def add_model_argument(parser: FlexibleArgumentParser) -> None:
    """The positional model; for `choose_model`, --model must have no default."""
    parser.add_argument(
        "model_tag",
        nargs="?",
        metavar="MODEL",
        help=f"Model path or repository (default: {DEFAULT_MODEL}).",
    )


def choose_model(positional: str | None, flag: str | None) -> str:
    """The positional model before --model before the default."""
    if positional is None:
        return flag or DEFAULT_MODEL
    if flag not in (None, positional):
        logger.warning("both MODEL and --model are given; taking %s, not %s", positional, flag)
    return positional
