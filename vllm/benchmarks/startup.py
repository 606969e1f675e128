# SPDX-License-Identifier: Apache-2.0
"""`vllm bench startup`: where the time goes until a server answers."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import PositiveInt
from tqdm import trange

from vllm import envs
from vllm.benchmarks.offline import save_json
from vllm.entrypoints.cli.serve import ServeCommand
from vllm.entrypoints.cli.types import CommandError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.dataclass_flags import add_dataclass_flags, flag_specs, from_namespace
from vllm.utils.options import config, option
from vllm.utils.phase_ledger import UNACCOUNTED, PhaseEvent, ledger
from vllm.utils.result_file import check_file

DESCRIPTION = (
    "Start a server several times, each in fresh processes, and report where the time goes until "
    "it answers. All flags of vllm serve apply."
)
_SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
_POLL_S = 0.02
_STOP_S = 60.0
_LOG_LINES = 30


@config
class StartupArgs:
    """How often the server starts."""

    num_iters: PositiveInt = option(default=3, help="Starts.")
    output_json: str | None = option(default=None, help="File for the result.")


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """Declare the flags, the server's too: a mistake in those is found before the first start."""
    add_dataclass_flags(parser, StartupArgs, "Startup")
    ServeCommand().add_arguments(parser)


def server_part(argv: Sequence[str]) -> list[str]:
    """`argv` without the benchmark's own flags."""
    own = FlexibleArgumentParser(add_help=False)
    for spec in flag_specs(StartupArgs):
        own.add_argument(spec.flag)
    return own.parse_known_args(argv)[1]


def main(namespace: argparse.Namespace) -> int:
    """Run the benchmark."""
    args = from_namespace(StartupArgs, namespace)
    check_file("output_json", args.output_json)
    serve_flags = server_part(namespace.argv)
    bar = trange(args.num_iters, desc="Starting", unit="start", dynamic_ncols=True)
    runs = [start_once(serve_flags) for _ in bar]
    print(table(runs))
    save_json(args.output_json, result(runs))
    return 0


def result(runs: list[dict[str, float]]) -> dict[str, Any]:
    """The keys of the result file; seconds."""
    totals = [sum(run.values()) for run in runs]
    return {"avg_startup_time": sum(totals) / len(totals), "startup_times": totals, "phases": runs}


def start_once(serve_flags: list[str]) -> dict[str, float]:
    """Seconds per phase of one start; `CommandError` with the end of the log if it fails."""
    with tempfile.TemporaryDirectory(prefix="vllm-startup-") as folder:
        phases, log, socket = (Path(folder) / name for name in ("phases", "log", "socket"))
        began = time.monotonic()
        with _server(serve_flags, phases, log, socket) as process:
            _wait_until_ready(process, socket, log)
            ended = time.monotonic()
        events = read_events(phases.read_text(encoding="utf-8"))
    # The start of a process is known to 10 ms, and may seem to lie before the command.
    inside = [replace(e, time_s=max(e.time_s, began)) for e in events if e.time_s < ended]
    return ledger(inside, began, ended)


@contextlib.contextmanager
def _server(
    serve_flags: list[str], phases: Path, log: Path, socket: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """`vllm serve` with everything it starts; gone on leaving."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_SERVE, *serve_flags, "--uds", str(socket)],
            env={**os.environ, "VLLM_STARTUP_PHASES": str(phases)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    deadline = time.monotonic() + envs.VLLM_ENGINE_READY_TIMEOUT_S
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://server"
    ) as http:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if http.get("/health").is_success:
                    return
            time.sleep(_POLL_S)
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    raise CommandError("the server did not start; its log ends:\n" + "\n".join(tail))


def read_events(text: str) -> list[PhaseEvent]:
    """The file that `vllm.utils.startup_phases` writes."""
    return [PhaseEvent(**json.loads(line)) for line in text.splitlines()]


def table(runs: Sequence[dict[str, float]]) -> str:
    """One row per phase, one column per run, and the mean with its share of the total."""
    names = [n for n in dict.fromkeys(name for run in runs for name in run) if n != UNACCOUNTED]
    rows = [[run.get(name, 0.0) for run in runs] for name in (*names, UNACCOUNTED)]
    totals = [sum(run.values()) for run in runs]
    whole = sum(totals) / len(runs)
    width = max(map(len, [*names, UNACCOUNTED, "total (wall time)"]))
    columns = [f"run {i + 1}" for i in range(len(runs))] + ["mean", "share"]
    lines = [" " * width + "".join(f"{column:>10}" for column in columns)]
    for name, values in zip(
        [*names, UNACCOUNTED, "total (wall time)"], [*rows, totals], strict=True
    ):
        mean = sum(values) / len(values)
        cells = "".join(f"{value:>9.2f}s" for value in (*values, mean))
        lines.append(f"{name:<{width}}{cells}{100 * mean / whole:>9.1f}%")
    return "\n".join(lines)
