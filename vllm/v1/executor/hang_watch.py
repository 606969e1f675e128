# SPDX-License-Identifier: Apache-2.0
"""Finds workers that do not go on while somebody waits for them.

A worker that loads, compiles or computes uses a processor or a disk, for as long as it takes. What
is wrong when one waits for others in a collective, or has answered while others have not, and
nobody does anything: then no rank can come to what the others wait for. A collective that all ranks
are in may be a slow one, and gets more time. A worker whose beats stop is wrong, too. Replicas that
share experts tell each other what their workers do, since a worker of one may wait for those of
another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.executor.pulse import BEAT_S, LONGEST_BEAT_S, Beat
from vllm.v1.executor.replica_reports import ReplicaReports, Report

#: how long nobody may go on
HANG_S = 20.0
#: how long a collective may take that all are in
SLOW_S = 120.0
#: how long a worker that cannot be seen from here may take until its first beat
_FIRST_BEAT_S = 120.0


@dataclass(frozen=True)
class Asked:
    """What workers have not answered: `is_call`, or a step; `patience_s`: how long whoever asked
    has said that it may take."""

    is_call: bool
    patience_s: float = 0.0


class _Member:
    """The last beat of a thread, and how long ago it was."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.beat: Beat | None = None
        self.silent_s = 0.0

    @property
    def still_s(self) -> float:
        return self.silent_s + (0.0 if self.beat is None else self.beat.still_s)

    @property
    def is_idle(self) -> bool:
        return self.beat is not None and self.beat.is_idle

    @property
    def is_in_collective(self) -> bool:
        return self.beat is not None and self.beat.is_in_collective

    def __str__(self) -> str:
        beat = self.beat
        if beat is None:
            return f"{self.name} has said nothing so far"
        silent = f", and says nothing any more for {self.silent_s:.0f} s" if self.is_silent else ""
        if beat.is_idle:
            return f"{self.name} has nothing to do{silent}"
        what = "is in no collective" if beat.waits_for is None else f"waits for {beat.waits_for}"
        return f"{self.name} {what}{silent}, at {beat.frames}"

    @property
    def is_silent(self) -> bool:
        return self.silent_s > 3 * BEAT_S


class HangWatch:
    """Looks once a second, from `start` to `stop`, and calls `ends` once.

    `asked`: what workers have not answered, None where nobody waits for them; `sees_work`: whether
    the worker of a rank does something, for one whose beats do not come; None if that cannot be
    seen. `reports`: of replicas that share experts.
    """

    def __init__(
        self,
        ranks: range,
        asked: Callable[[], Asked | None],
        sees_work: Callable[[int], bool | None],
        ends: Callable[[Exception], None],
        reports: ReplicaReports | None = None,
    ) -> None:
        self._members = {rank: _Member(f"rank {rank}") for rank in ranks}
        #: the engine core's own thread, where it waits for other replicas
        self._core = _Member("the engine core")
        self._asked, self._sees_work, self._ends = asked, sees_work, ends
        self._reports = reports
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)

    def start(self) -> None:
        """Other replicas have this one's first report when this returns: it may be stopped at any
        moment from now on."""
        if self._reports is not None:
            self._reports.exchange(self._report(self._asked()))
        self._thread.start()

    def stop(self) -> None:
        """Returns when `ends` has, unless that calls this."""
        self._stopped.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def take(self, rank: int, beat: Beat) -> None:
        """The beat of a worker; on any thread."""
        member = self._members[rank]
        member.beat, member.silent_s = beat, 0.0

    def take_core(self, beat: Beat) -> None:
        """Of the engine core's own thread."""
        self._core.beat, self._core.silent_s = beat, 0.0

    def places(self) -> str:
        """Where all are, for errors."""
        return "; ".join(map(str, self._members.values()))

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._stopped.is_set():
            now_s = time.monotonic()
            found = self.look(min(now_s - before_s, LONGEST_BEAT_S))
            before_s = now_s
            if found is not None:
                self._ends(TimeoutError(found))
                return
            self._stopped.wait(BEAT_S)

    def look(self, passed_s: float) -> str | None:
        """What is wrong, `passed_s` after the last look."""
        asked = self._asked()
        for rank, member in self._members.items():
            seen = asked is None or (member.is_silent and self._sees_work(rank))
            # Beats need Python, which a long call into a library may keep to itself.
            member.silent_s = 0.0 if seen else member.silent_s + passed_s
        own = self._report(asked)
        reports = [own] if self._reports is None else self._reports.exchange(own)
        if self._reports is None and asked is None:
            return None
        limit_s = HANG_S if asked is None else max(HANG_S, asked.patience_s)
        if silent := self._silent_ranks(limit_s):
            return _message(f"{_ranks(silent)} {_do(silent)} not go on", limit_s, reports)
        if len({one.all_in for one in reports}) == 1 and own.all_in is not None:
            limit_s = max(SLOW_S, limit_s)
        if max(one.waits_s for one in reports) < limit_s:
            return None
        if min(one.still_s for one in reports) < limit_s:
            return None
        return _message("no worker goes on", limit_s, reports)

    def _silent_ranks(self, limit_s: float) -> list[int]:
        found = []
        for rank, member in self._members.items():
            blind = member.beat is None and self._sees_work(rank) is None
            if member.silent_s >= max(limit_s, _FIRST_BEAT_S if blind else 0.0):
                found.append(rank)
        return found

    def _report(self, asked: Asked | None) -> Report:
        members = list(self._members.values())
        waiting = [one.still_s for one in members if one.is_in_collective]
        idle = [one.still_s for one in members if one.is_idle]
        if asked is not None and asked.is_call and idle and len(idle) < len(members):
            waiting += idle  # who has answered waits for those that have not
        places = [str(one) for one in members]
        inside = {
            one.beat.waits_for if one.beat is not None and one.is_in_collective else None
            for one in members
        }
        all_in = inside.pop() if len(inside) == 1 else None
        if self._reports is not None:
            members.append(self._core)
            if self._core.is_in_collective:
                all_in = None
                waiting.append(self._core.still_s)
                places.append(str(self._core))
        still_s = min(one.still_s for one in members)
        return Report(max(waiting, default=0.0), still_s, places, all_in)


def _ranks(ranks: Sequence[int]) -> str:
    several = "s" * (len(ranks) > 1)
    return f"the worker{several} of rank{several} {', '.join(map(str, ranks))}"


def _do(ranks: Sequence[int]) -> str:
    return "do" if len(ranks) > 1 else "does"


def _message(what: str, limit_s: float, reports: Sequence[Report]) -> str:
    return f"{what}, for {limit_s:g} s: " + "; ".join(
        place for report in reports for place in report.places
    )
