# SPDX-License-Identifier: Apache-2.0
"""What a server of several processes costs until it serves: seconds, seconds of cores, memory.

    python -m benchmarks.process_starts docs/measurements/process_starts.json

Starts `vllm serve` of a tiny model with one and more API processes, replicas and workers, and waits
until all API processes listen; once as it is, and once with processes that import everything anew
(`VLLM_WORKER_MULTIPROC_METHOD=spawn`). Of `--num-iters` starts the shortest counts: what else the
machine does only adds to it. Python's bytecode should be there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.served_process import ServedProcess

_MODEL = "examples/models/tiny-qwen3_5-code"
_COMMAND = ("-m", "vllm.entrypoints.cli.main", "serve", _MODEL)
_SIZES = ("--max-model-len", "2k", "--kv-cache-memory-bytes", "256M")
_TIMEOUT_S = 300.0
_POLL_S = 0.02

#: flags -> how many API processes there are
_SERVERS = {
    "": 1,
    "--api-server-count 2": 2,
    "--api-server-count 4": 4,
    "-dp 2": 1,
    "-tp 2": 1,
    "-dp 2 -tp 2 --api-server-count 2": 2,
}


#: what is set for each column
_METHODS: dict[str, dict[str, str]] = {
    "as it is": {},
    "spawned": {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
}


def measure(flags: str, num_api: int, method: str) -> dict[str, Any]:
    """One start: wall and CPU seconds, and the bytes of all processes, shared ones once."""
    environment = {**os.environ, **_METHODS[method]}
    command = [*_COMMAND, *_SIZES, *flags.split()]
    began = time.monotonic()
    with ServedProcess(command, _TIMEOUT_S, environment) as server:
        # All sockets are the first process's, too.
        while num_listening(server.process) < num_api:
            time.sleep(_POLL_S)
        wall_s = time.monotonic() - began
        processes = [server.process, *server.process.children(recursive=True)]
        return {
            "flags": flags,
            "method": method,
            "wall_s": wall_s,
            "cpu_s": sum(server.cpu().values()),
            "bytes": sum(process.memory_full_info().pss for process in processes),
        }


def num_listening(process: psutil.Process) -> int:
    """How many of its sockets listen."""
    return sum(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))


def rows(runs: list[dict[str, Any]]) -> str:
    """A line per server, the shortest of its starts."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: -run["wall_s"]):
        best[run["flags"], run["method"]] = run
    lines = [
        "| `vllm serve` with | seconds | CPU seconds | memory | all spawned: seconds | CPU seconds "
        "| memory |",
        "|---" * 7 + "|",
    ]
    for flags in dict.fromkeys(run["flags"] for run in runs):
        cells = [f"`{flags}`" if flags else "no flag"]
        for method in _METHODS:
            run = best[flags, method]
            cells += [f"{run['wall_s']:.1f}", f"{run['cpu_s']:.1f}", f"{run['bytes'] / 1e6:.0f} MB"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    parser.add_argument("--num-iters", type=int, default=3)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for _ in range(args.num_iters):
        for flags, num_api in _SERVERS.items():
            for method in _METHODS:
                runs.append(measure(flags, num_api, method))
                args.output.write_text(json.dumps(runs, indent=1) + "\n")
    print(rows(runs))


if __name__ == "__main__":
    main()
