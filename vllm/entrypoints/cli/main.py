# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command: finds the subcommand and imports nothing else."""

import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.entrypoints.cli.types import CLISubcommand

#: name -> (module with a `command()` factory, one line of help)
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("vllm.entrypoints.cli.serve", "Serve a model over HTTP (OpenAI API)."),
    "chat": ("vllm.entrypoints.cli.openai_client", "Chat with a running server."),
    "complete": ("vllm.entrypoints.cli.openai_client", "Complete text with a running server."),
    "collect-env": ("vllm.entrypoints.cli.collect_env", "Describe this machine for bug reports."),
}


def usage() -> str:
    """The top-level help."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: vllm [-h] [-v] COMMAND ...",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help     show this help; `vllm COMMAND --help` for a command's flags",
            "  -v, --version  show the version",
        ]
    )


def load_command(name: str) -> "CLISubcommand":
    """The subcommand object."""
    module = importlib.import_module(SUBCOMMANDS[name][0])
    command: CLISubcommand = module.command(name)
    return command


def main(argv: list[str] | None = None) -> int:
    """Run `vllm argv`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    first = argv[0] if argv else ""
    if first in ("-v", "--version"):
        print(__version__)
        return 0
    if first in ("-h", "--help"):
        print(usage())
        return 0
    if first not in SUBCOMMANDS:
        print(usage(), file=sys.stderr)
        what = f"unknown command {first!r}" if first else "no command given"
        print(f"\nvllm: error: {what}", file=sys.stderr)
        return 2
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return _run(first, argv[1:])


def _run(name: str, argv: list[str]) -> int:
    """Parse and run; the last line on stderr names the cause of a failure."""
    try:
        command = load_command(name)
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser(prog=f"vllm {name}", description=command.description)
        command.add_arguments(parser)
        return command.run(parser.parse_args(argv))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        report_failure(name, error)
        return 1


def report_failure(name: str, error: Exception) -> None:
    """Log what is unexpected, then say the cause in one line."""
    from vllm.exceptions import VLLMValidationError
    from vllm.logger import init_logger

    if not isinstance(error, VLLMValidationError):
        init_logger(__name__).error("vllm %s failed", name, exc_info=error)
    cause = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    kind = "" if isinstance(error, VLLMValidationError) else f"{type(error).__name__}: "
    print(f"vllm {name}: error: {kind}{cause or repr(error)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
