# SPDX-License-Identifier: Apache-2.0
"""The CI pipeline, from `.buildkite/test_areas/*.yaml`.

    pipeline.py emit    print the Buildkite pipeline; steps whose source files did not change
                        since the merge base (env BUILDKITE_PULL_REQUEST_BASE_BRANCH) are left out
    pipeline.py run     run the CPU steps here, in order, stopping at the first failure

A test area has `group`, and `steps` with `label`, `commands`, `timeout_in_minutes`,
`source_file_dependencies` (path prefixes; none: always), `device` (absent: CPU; `h200`: a GPU
queue) and `nightly` (true: in builds that a schedule starts, env BUILDKITE_SOURCE, alone).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import yaml
except ImportError:
    raise SystemExit(
        "error: the agent that uploads the pipeline needs PyYAML: pip install pyyaml"
    ) from None

_ROOT = Path(__file__).resolve().parent.parent
_AREAS = _ROOT / ".buildkite" / "test_areas"
_KEYS = {"label", "commands", "timeout_in_minutes", "source_file_dependencies", "device", "nightly"}


@dataclass(frozen=True)
class Step:
    """One step of a test area."""

    group: str
    label: str
    commands: list[str]
    timeout_in_minutes: int
    source_file_dependencies: list[str]
    device: str | None
    nightly: bool

    def touched_by(self, changed: list[str] | None) -> bool:
        """Whether any changed path (None: unknown) lies under a dependency."""
        if changed is None or not self.source_file_dependencies:
            return True
        return any(
            path.startswith(prefix) for path in changed for prefix in self.source_file_dependencies
        )


def load_steps() -> list[Step]:
    """Every step, areas in file-name order; ValueError for an unknown or missing key."""
    steps: list[Step] = []
    for path in sorted(_AREAS.glob("*.yaml")):
        area = yaml.safe_load(path.read_text())
        for raw in area["steps"]:
            unknown = set(raw) - _KEYS
            if unknown:
                raise ValueError(f"{path.name}: unknown keys {sorted(unknown)}; known: {_KEYS}")
            steps.append(
                Step(
                    group=area["group"],
                    label=raw["label"],
                    commands=raw["commands"],
                    timeout_in_minutes=raw["timeout_in_minutes"],
                    source_file_dependencies=raw.get("source_file_dependencies", []),
                    device=raw.get("device"),
                    nightly=raw.get("nightly", False),
                )
            )
    return steps


def _changed_files() -> list[str] | None:
    base = os.environ.get("BUILDKITE_PULL_REQUEST_BASE_BRANCH")
    if not base:
        return None
    command = ["git", "diff", "--name-only", f"origin/{base}...HEAD"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"error: `{' '.join(command)}` failed: {done.stderr.strip()}\n"
            f"fetch the base branch and its history first: git fetch origin {base}"
        )
    return done.stdout.splitlines()


def emit() -> None:
    """Print the pipeline as YAML."""
    changed = _changed_files()
    scheduled = os.environ.get("BUILDKITE_SOURCE") == "schedule"
    groups: dict[str, list[dict[str, Any]]] = {}
    for step in load_steps():
        if step.touched_by(changed) and (scheduled or not step.nightly):
            groups.setdefault(step.group, []).append(
                {
                    "label": step.label,
                    "commands": step.commands,
                    "timeout_in_minutes": step.timeout_in_minutes,
                    "agents": {"queue": f"gpu-{step.device}" if step.device else "cpu"},
                }
            )
    pipeline = [{"group": group, "steps": steps} for group, steps in groups.items()]
    yaml.safe_dump({"steps": pipeline}, sys.stdout, sort_keys=False)


def run() -> int:
    """Run the CPU steps; the exit code is that of the first failing command."""
    for step in load_steps():
        if step.device is not None:
            print(f"--- skipped, needs {step.device}: {step.group} / {step.label}", flush=True)
            continue
        if step.nightly:
            print(f"--- skipped, runs every night: {step.group} / {step.label}", flush=True)
            continue
        print(f"--- {step.group} / {step.label}", flush=True)
        started = time.monotonic()
        for command in step.commands:
            limit = step.timeout_in_minutes * 60 - (time.monotonic() - started)
            try:
                code = subprocess.run(
                    ["bash", "-c", command], cwd=_ROOT, stdin=subprocess.DEVNULL, timeout=limit
                ).returncode
            except subprocess.TimeoutExpired:
                print(f"error: {step.label} ran past {step.timeout_in_minutes} minutes")
                return 124
            if code != 0:
                print(f"error: {command!r} exited with {code}")
                return code
        print(f"    {time.monotonic() - started:.0f} s", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["emit", "run"])
    if parser.parse_args().action == "emit":
        emit()
        return 0
    return run()


if __name__ == "__main__":
    sys.exit(main())
