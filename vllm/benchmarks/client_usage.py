# SPDX-License-Identifier: Apache-2.0
"""How busy the client processes were: whether a result is the server's or the clients' own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: A process that is busier than this share of its time reads tokens late.
BUSY_LIMIT = 0.8
_SCHEDSTAT = Path("/proc/self/schedstat")


@dataclass(frozen=True)
class ClientUsage:
    """Seconds of one client process, from the start of the load to the end of its last request.

    `ready_s` is the time in which it could have run but had no core, None where the system does not
    say (only Linux does).
    """

    cpu_s: float
    ready_s: float | None
    wall_s: float

    @property
    def busy(self) -> float:
        """Share of the time in which the process had work: running, or waiting for a core."""
        return (self.cpu_s + (self.ready_s or 0.0)) / self.wall_s if self.wall_s > 0 else 0.0


class UsageClock:
    """Counts for this process from its creation on."""

    def __init__(self) -> None:
        self._cpu_s, self._ready_s = time.process_time(), _ready_s()
        self._began = time.perf_counter()

    def usage(self) -> ClientUsage:
        ready_s = _ready_s()
        waited = None if ready_s is None or self._ready_s is None else ready_s - self._ready_s
        wall_s = time.perf_counter() - self._began
        return ClientUsage(time.process_time() - self._cpu_s, waited, wall_s)


def _ready_s() -> float | None:
    """Seconds that the main thread waited for a core so far: the second number of schedstat."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return None


def client_limited(clients: Sequence[ClientUsage]) -> bool:
    """Whether the figures may be the clients' rather than the server's."""
    return any(client.busy > BUSY_LIMIT for client in clients)


def usage_figures(clients: Sequence[ClientUsage], num_tokens: int) -> dict[str, Any]:
    """Keys for a result; seconds per process, shares in [0, 1]."""
    cpu_s = sum(client.cpu_s for client in clients)
    return {
        "client_processes": len(clients),
        "client_cpu_s": [client.cpu_s for client in clients],
        "client_ready_s": [client.ready_s for client in clients],
        "client_wall_s": [client.wall_s for client in clients],
        "client_max_busy": max(client.busy for client in clients),
        "client_cpu_us_per_token": cpu_s * 1e6 / num_tokens if num_tokens else None,
        "client_limited": client_limited(clients),
    }


def limited_warning(clients: Sequence[ClientUsage]) -> str:
    """What to print beside figures of clients that were too busy."""
    busiest = max(client.busy for client in clients)
    return (
        f"NOT A RESULT OF THE SERVER: a client process was busy {busiest:.0%} of the time (limit "
        f"{BUSY_LIMIT:.0%}), so the clients may be what was measured. Use more --client-processes, "
        "or more cores, or run the clients on another machine."
    )
