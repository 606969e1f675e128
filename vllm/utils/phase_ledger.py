# SPDX-License-Identifier: Apache-2.0
"""From the begins and ends of phases to seconds per phase that sum to the whole time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: the time that no phase covers
UNACCOUNTED = "unaccounted"


@dataclass(frozen=True)
class PhaseEvent:
    """A phase begins or ends; `time_s` is on the machine's monotonic clock."""

    name: str
    begins: bool
    time_s: float


def ledger(events: Iterable[PhaseEvent], began_s: float, ended_s: float) -> dict[str, float]:
    """Seconds per phase, in the order the phases began, then `UNACCOUNTED`.

    Each instant counts once, for the phase that began last of those that run; so the values sum to
    `ended_s - began_s`. A phase that never ends lasts to the end.
    """
    seconds: dict[str, float] = {}
    unaccounted = 0.0
    running: list[str] = []
    previous = began_s
    for event in sorted(events, key=lambda e: e.time_s):
        elapsed = event.time_s - previous
        previous = event.time_s
        if running:
            seconds[running[-1]] += elapsed
        else:
            unaccounted += elapsed
        if event.begins:
            running.append(event.name)
            seconds.setdefault(event.name, 0.0)
        elif event.name in running:
            last = len(running) - 1 - running[::-1].index(event.name)
            del running[last]
    if running:
        seconds[running[-1]] += ended_s - previous
    else:
        unaccounted += ended_s - previous
    return {**seconds, UNACCOUNTED: unaccounted}
