# SPDX-License-Identifier: Apache-2.0
"""What a subcommand of `vllm` is."""

import abc
import argparse
from typing import TYPE_CHECKING

from vllm.exceptions import ExplainedError

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


class CommandError(ExplainedError, RuntimeError):
    """A command cannot do its work."""


class CLISubcommand(abc.ABC):
    """Flags and action of one subcommand; its module is imported only when it is called."""

    #: shown by `vllm <name> --help`
    description: str

    def __init__(self, name: str = "") -> None:
        """`name`: the words of the command line that led here."""
        self.name = name

    @abc.abstractmethod
    def add_arguments(self, parser: "FlexibleArgumentParser") -> None:
        """Declare the flags."""

    @abc.abstractmethod
    def run(self, args: argparse.Namespace) -> int:
        """Do the work; the return value is the process's exit status.

        `args.argv`: the words that were parsed.
        """
