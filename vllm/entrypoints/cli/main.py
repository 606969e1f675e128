# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command: finds the subcommand and imports nothing else.

And nothing before interrupts are handled: while this module is imported they show where it was.
"""

import importlib
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from vllm.utils.interrupts import interrupts_end, interrupts_raise
from vllm.version import __version__

if TYPE_CHECKING:
    import argparse

    from vllm.entrypoints.cli.types import CLISubcommand

#: name, of one or two words -> (module of this package and its class, one line of help)
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("serve:ServeCommand", "Serve a model over HTTP (OpenAI API)."),
    "chat": ("openai_client:ChatCommand", "Chat with a running server."),
    "complete": ("openai_client:CompleteCommand", "Complete text with a running server."),
    "bench serve": ("bench:BenchCommand", "Benchmark a running server."),
    "bench latency": ("bench:BenchCommand", "Benchmark one batch, offline."),
    "bench throughput": ("bench:BenchCommand", "Benchmark many requests, offline."),
    "bench acceptance": ("bench:BenchCommand", "Predict how many drafts are accepted."),
    "bench scaling": ("bench:BenchCommand", "Compare layouts of devices, offline."),
    "bench startup": ("bench:BenchCommand", "Benchmark the start of a server."),
    "run-batch": ("run_batch:RunBatchCommand", "Answer a file of OpenAI batch requests."),
    "proxy": ("proxy:ProxyCommand", "Route between servers for prompts and for answers."),
    "tune": ("tune:TuneCommand", "Measure the kernels' launch parameters on this GPU."),
    "graph-check": (
        "graph_check:GraphCheckCommand",
        "Find what keeps a model from being captured in a graph.",
    ),
    "explain": ("explain:ExplainCommand", "Say what a configuration allocates, and why."),
    "collect-env": ("collect_env:CollectEnvCommand", "Describe this machine for bug reports."),
}


def usage(group: str = "") -> str:
    """The help on all commands, or on those whose first word is `group`."""
    shown = {name: text for name, (_, text) in SUBCOMMANDS.items() if in_group(name, group)}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {text}" for name, text in shown.items()]
    return "\n".join(
        [
            f"usage: vllm {group or '[-v]'} [-h] COMMAND ...",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help     show this help; `vllm COMMAND --help` for a command's flags",
            *([] if group else ["  -v, --version  show the version"]),
        ]
    )


def in_group(name: str, group: str) -> bool:
    """Whether a command is `group ...`; every command is in the group without a name."""
    return not group or name.startswith(group + " ")


def find_command(argv: list[str]) -> str | None:
    """The command that `argv` begins with."""
    for words in (2, 1):
        if (name := " ".join(argv[:words])) in SUBCOMMANDS:
            return name
    return None


def load_command(name: str) -> "CLISubcommand":
    """The subcommand object."""
    module, _, kind = SUBCOMMANDS[name][0].partition(":")
    made = getattr(importlib.import_module(f"vllm.entrypoints.cli.{module}"), kind)
    return made(name)


def main(argv: list[str] | None = None) -> int:
    """Run `vllm argv`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    first = argv[0] if argv else ""
    if first in ("-v", "--version"):
        print(__version__)
        return 0
    name = find_command(argv)
    if name is None:
        return _answer_usage(argv)
    return _run(name, argv[len(name.split()) :])


def _answer_usage(argv: list[str]) -> int:
    """Help where it was asked for, else an error."""
    first = argv[0] if argv else ""
    group = first if any(in_group(name, first) for name in SUBCOMMANDS if first) else ""
    rest = argv[1:] if group else argv
    if rest and rest[0] in ("-h", "--help"):
        print(usage(group))
        return 0
    print(usage(group), file=sys.stderr)
    what = f"unknown command {rest[0]!r}" if rest else "no command given"
    print(f"\nvllm{' ' + group if group else ''}: error: {what}", file=sys.stderr)
    return 2


def _run(name: str, argv: list[str]) -> int:
    """Parse and run; the last line on stderr names the cause of a failure."""
    try:
        with interrupts_end():
            from vllm.envs import check_variables
            from vllm.utils.start_method import spawning

            check_variables()
            with _engine_process(name, argv), spawning():
                command, args = _parse(name, argv)
                if name != "serve":  # which imports more, and then takes its signals
                    interrupts_raise()
                return command.run(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return 128 + signal.SIGPIPE
        report_failure(name, error)
        return 1


def _parse(name: str, argv: list[str]) -> "tuple[CLISubcommand, argparse.Namespace]":
    from vllm.utils.imports import gc_paused

    with gc_paused():
        command = load_command(name)
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser(prog=f"vllm {name}", description=command.description)
        command.add_arguments(parser)
    args = parser.parse_args(argv)
    args.argv = argv
    return command, args


def _engine_process(name: str, argv: list[str]) -> AbstractContextManager[None]:
    """For a server: the engine's process, which imports what it needs while this one does."""
    without = ("-h", "--help", "--headless")
    if name != "serve" or any(word.partition("=")[0] in without for word in argv):
        return nullcontext()
    from vllm.v1.engine.spare_process import prestarted

    return prestarted()


def _reader_left() -> bool:
    """Whether nobody reads stdout any more, as after `| head`; what is left of it is dropped."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def report_failure(name: str, error: Exception) -> None:
    """Log what is unexpected, then say the cause in one line."""
    from vllm.exceptions import ExplainedError
    from vllm.logger import init_logger

    explained = isinstance(error, ExplainedError)
    if not explained:
        init_logger(__name__).error("vllm %s failed", name, exc_info=error)
    cause = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    kind = "" if explained else f"{type(error).__name__}: "
    print(f"vllm {name}: error: {kind}{cause or repr(error)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
