# SPDX-License-Identifier: Apache-2.0
"""What replicas that share experts tell each other of their workers, in files of one directory."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config.parallel import ParallelConfig

#: a replica that has given no report may be starting for this long
_FIRST_REPORT_S = 120.0
#: who has given none for this long does not run
_OLD_S = 3.0


@dataclass(frozen=True)
class Report:
    """`waits_s`: the longest time that one of a replica's threads waits for others; `still_s`: how
    long none of them has done anything; `places`: where each is; `all_in`: what all workers wait
    for, None if they wait for several things or for nothing."""

    waits_s: float
    still_s: float
    places: list[str]
    all_in: str | None


class ReplicaReports:
    """Of replica `rank` and the `size - 1` others, which are on this host."""

    def __init__(self, directory: str, rank: int, size: int) -> None:
        self._directory = Path(directory)
        self._rank, self._size = rank, size
        self._began_s = time.monotonic()

    def exchange(self, own: Report) -> list[Report]:
        """Give one's own; the last ones of all replicas, by rank. A replica that does not run any
        more gives none: its last one grows old."""
        path = self._path(self._rank)
        new = path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):  # the directory goes with the server
            new.write_text(json.dumps({"at_s": time.monotonic(), **asdict(own)}))
            os.replace(new, path)
        return [self._read(rank) for rank in range(self._size)]

    def _path(self, rank: int) -> Path:
        return self._directory / f"workers-{rank}.json"

    def _read(self, rank: int) -> Report:
        try:
            content = json.loads(self._path(rank).read_text())
        except FileNotFoundError:
            late_s = max(0.0, time.monotonic() - self._began_s - _FIRST_REPORT_S)
            return Report(0.0, late_s, [f"replica {rank} has not begun"], None)
        age_s = time.monotonic() - content.pop("at_s")
        report = Report(**content)
        return replace(
            report,
            still_s=report.still_s + age_s,
            places=[f"replica {rank}: {place}" for place in report.places],
            all_in=report.all_in if age_s < _OLD_S else None,
        )


def reports_of(parallel: ParallelConfig) -> ReplicaReports | None:
    """None where a replica's workers wait for no other ones."""
    if not parallel.replicas_share_experts:
        return None
    rank, size = parallel.data_parallel_rank, parallel.data_parallel_size
    return ReplicaReports(parallel.meeting_directory, rank, size)
