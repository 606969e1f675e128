# SPDX-License-Identifier: Apache-2.0
"""What torch's allocator did while steps ran: in steady state it asks the driver for nothing, and
what is in use does not grow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm.compilation.graph_safety.simulator.spots import is_machinery
from vllm.compilation.graph_safety.walker import Finding

#: counters that steady steps leave alone; within its cache the allocator gives and takes
STEADY = ("segment.all.allocated", "num_alloc_retries")


@contextmanager
def allocations_noted(device: torch.device) -> Iterator[list[Finding]]:
    """Inside the block memory that the allocator takes from the driver is noted, with its place."""
    findings: list[Finding] = []
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=100_000)
    try:
        before = counters(device)
        yield findings
        torch.cuda.synchronize(device)
        after, snapshot = counters(device), torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    findings += taken_segments(snapshot["device_traces"][device.index])
    for name in STEADY:
        if after[name] > before[name] and not findings:
            message = f"{name} grew from {before[name]} to {after[name]} in steady steps"
            findings.append(Finding(__file__, 1, 1, 9, message, __name__, ""))


def counters(device: torch.device) -> dict[str, int]:
    """The allocator's counters named in `STEADY`."""
    stats = torch.cuda.memory_stats(device)
    return {name: stats[name] for name in STEADY}


def taken_segments(trace: list[dict[str, Any]]) -> list[Finding]:
    """Where memory was taken from the driver: of an allocator's trace of one device, each place
    once."""
    found: dict[Finding, None] = {}
    for event in trace:
        if event["action"] not in ("segment_alloc", "segment_map"):
            continue
        frames = [f for f in event.get("frames", ()) if not is_machinery(f["filename"])]
        message = f"{event['size']} bytes are taken from the driver in a steady step"
        if frames:
            top = frames[0]
            place = (top["filename"], max(top["line"], 1), top["name"])
        else:
            place = (__file__, 1, __name__)
        found.setdefault(Finding(place[0], place[1], 1, 6, message, place[2], ""))
    return list(found)


def growth(levels: list[int]) -> str | None:
    """How bytes in use after each step have grown, in words; None where they have not.

    Requests come and go, and something may be made at its first use. What grows with the steps is
    higher in the third of five parts, at its lowest, than in the first at its highest, and again in
    the fifth than in the third: one jump is never both.
    """
    size = len(levels) // 5
    if not size:
        return None
    first, third, fifth = (levels[i * size : (i + 1) * size] for i in (0, 2, 4))
    if min(third) <= max(first) or min(fifth) <= max(third):
        return None
    return f"bytes in use grow with the steps, from {levels[0]} to {levels[-1]} in {len(levels)}"
