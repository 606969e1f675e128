# SPDX-License-Identifier: Apache-2.0
"""How long the engine takes to start: every start in processes of its own.

    python -m benchmarks.starts docs/measurements/h200_starts.json

`LLM(...)` with the settings of `benchmarks.offline` without compiled kernels or plans, and then
with what this start left, counted from before `import vllm`; then `vllm serve` with the same flags
until it answers, with all graphs captured and with `--ready-in 8`. Python's own bytecode should be
there (`PYTHONDONTWRITEBYTECODE` unset, a second run).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.offline import default_settings

_TIMEOUT_S = 120
_LLM = """
import json, sys, time
began = time.perf_counter()
from vllm import LLM
if __name__ == "__main__":
    LLM(**json.loads(sys.argv[1]))
    print("ready after", time.perf_counter() - began)
"""


def llm_start(folder: Path, settings: dict[str, Any], env: dict[str, str]) -> float:
    """Seconds from before the import until `LLM(...)` returns."""
    script = folder / "start.py"
    script.write_text(_LLM)
    output = _run([sys.executable, str(script), json.dumps(settings)], env)
    return float(output.rpartition("ready after")[2])


def serve_starts(
    folder: Path, settings: dict[str, Any], env: dict[str, str], extra: list[str], count: int
) -> list[float]:
    """Seconds from the command until the server answers, of `count` starts."""
    result = folder / "startup.json"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "startup"]
    command += ["--num-iters", str(count), "--output-json", str(result)]
    _run([*command, *flags(settings), *extra], env)
    times: list[float] = json.loads(result.read_text())["startup_times"]
    return times


def flags(settings: dict[str, Any]) -> list[str]:
    """The same settings for the command line."""
    found = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found += [f"--{name}", str(value)]
    return found


def _run(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    settings = default_settings()
    times: dict[str, list[float]] = {}

    def record(name: str, seconds: list[float]) -> None:
        times[name] = seconds
        print(name, [round(s, 2) for s in seconds], flush=True)
        args.output.write_text(json.dumps(times, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        caches = {"TRITON_CACHE_DIR": "kernels", "VLLM_CACHE_ROOT": "plans"}
        env = os.environ | {variable: str(folder / place) for variable, place in caches.items()}
        record("start, empty kernel cache", [llm_start(folder, settings, env)])
        record("second start", [llm_start(folder, settings, env) for _ in range(2)])
        record("vllm serve", serve_starts(folder, settings, env, [], 2))
        ready = ["--ready-in", "8"]
        record("vllm serve --ready-in 8", serve_starts(folder, settings, env, ready, 2))


if __name__ == "__main__":
    main()
