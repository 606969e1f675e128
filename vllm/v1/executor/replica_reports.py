# SPDX-License-Identifier: Apache-2.0
"""What replicas that share experts tell each other of their workers, in files of one directory."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.utils.activity import Activity, Scope

if TYPE_CHECKING:
    from vllm.config.parallel import ParallelConfig

#: a replica that has given no report may be starting for this long
_FIRST_REPORT_S = 120.0
#: who has given none for this long may not run
_OLD_S = 3.0


@dataclass(frozen=True)
class Report:
    """`waits_s`: the longest time that one of a replica's threads waits for others; `still_s`: how
    long none of them has done anything; `places`: where each is; `all_in`: what all workers wait
    for, None if they wait for several things or for nothing; `patience_s`: how long whoever waits
    for them has said that it may take; `silent_s`: how long there has been no newer report, and the
    core's process has done nothing."""

    waits_s: float
    still_s: float
    places: list[str]
    all_in: str | None
    patience_s: float = 0.0
    silent_s: float = 0.0


@dataclass
class _Other:
    """The last report of another replica, and the process that gave it."""

    silent_s: float = 0.0
    at_s: float = -1.0
    report: Report | None = None
    process: Activity | None = None


class ReplicaReports:
    """Of replica `rank` and the `size - 1` others, which are on this host."""

    def __init__(self, directory: str, rank: int, size: int) -> None:
        self._directory = Path(directory)
        self._rank = rank
        self._others = {other: _Other() for other in range(size) if other != rank}

    def exchange(self, own: Report, passed_s: float) -> list[Report]:
        """Give one's own; those of all replicas, by rank, `passed_s` after the last time. None at
        all when the server ends: the directory goes first. OSError when a file cannot be written.
        """
        path = self._path(self._rank)
        new = path.with_suffix(".new")
        try:
            content = {"at_s": time.monotonic(), "pid": os.getpid(), **asdict(own)}
            new.write_text(json.dumps(content))
            os.replace(new, path)
        except FileNotFoundError:
            return []
        reports = {rank: self._read(rank, one, passed_s) for rank, one in self._others.items()}
        reports[self._rank] = _named(own, self._rank)
        return [reports[rank] for rank in sorted(reports)]

    def _path(self, rank: int) -> Path:
        return self._directory / f"workers-{rank}.json"

    def _read(self, rank: int, other: _Other, passed_s: float) -> Report:
        """A report that does not change grows old by the time that passes here: all may have been
        paused."""
        self._update(rank, other, passed_s)
        if other.report is None:
            late_s = max(0.0, other.silent_s - _FIRST_REPORT_S)
            return Report(0.0, late_s, [f"replica {rank} has not begun"], None)
        return replace(
            _named(other.report, rank),
            still_s=other.report.still_s + other.silent_s,
            all_in=other.report.all_in if other.silent_s < _OLD_S else None,
            silent_s=other.silent_s,
        )

    def _update(self, rank: int, other: _Other, passed_s: float) -> None:
        try:
            content = json.loads(self._path(rank).read_text())
        except FileNotFoundError:
            other.silent_s += passed_s
            return
        at_s, pid = content.pop("at_s"), content.pop("pid")
        if at_s != other.at_s:
            other.at_s, other.silent_s, other.report = at_s, 0.0, Report(**content)
            other.process = other.process or Activity(pid, Scope.PROCESS)
            return
        other.silent_s += passed_s
        # Reports need Python, which a long call into a library may keep to itself.
        assert other.process is not None and other.report is not None
        if other.silent_s > _OLD_S and other.process.is_seen():
            other.silent_s, other.report = 0.0, replace(other.report, still_s=0.0)


def _named(report: Report, rank: int) -> Report:
    return replace(report, places=[f"replica {rank}: {place}" for place in report.places])


def reports_of(parallel: ParallelConfig) -> ReplicaReports | None:
    """None where a replica's workers wait for no other ones."""
    if not parallel.replicas_share_experts:
        return None
    rank, size = parallel.data_parallel_rank, parallel.data_parallel_size
    return ReplicaReports(parallel.meeting_directory, rank, size)
