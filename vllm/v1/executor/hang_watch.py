# SPDX-License-Identifier: Apache-2.0
"""Finds workers that do not go on while somebody waits for them.

A worker that loads, compiles or computes uses a processor or a disk, for as long as it takes. What
is wrong when one waits for others in a collective and nobody does anything: then no rank can come
to what the others wait for. A collective that all ranks are in may be a slow one, and gets more
time. A worker whose beats stop although its process does nothing is wrong, too. Replicas that share
experts tell each other what their workers do, since a worker of one may wait for those of another;
one that tells nothing and does nothing is wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from vllm import envs
from vllm.exceptions import HangError
from vllm.utils.silence import BEAT_S, LIMIT_S, LONGEST_LOOK_S, SILENT_S
from vllm.v1.executor.pulse import Beat
from vllm.v1.executor.replica_reports import ReplicaReports, Report

#: how long nobody may go on, unless `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS` or a call allows more
HANG_S = LIMIT_S
#: how long a collective may take that all are in
SLOW_S = 120.0
#: how long there may be no beat of a worker whose process cannot be seen from here
_UNSEEN_S = 120.0


class _Member:
    """The last beat of a thread, and how long ago it was."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.beat: Beat | None = None
        self.silent_s = 0.0
        self._is_seen: bool | None = False

    def take(self, beat: Beat) -> None:
        self.beat, self.silent_s = beat, 0.0

    def pass_over(self, passed_s: float, sees_work: Callable[[], bool | None]) -> None:
        """There was no beat for so much longer; whoever is seen to work goes on without any: beats
        need Python, which a long call into a library may keep to itself."""
        self.silent_s += passed_s
        if not self.is_silent:
            return
        self._is_seen = sees_work()
        if self._is_seen:
            self.silent_s = 0.0
            if self.beat is not None:
                self.beat = replace(self.beat, still_s=0.0)

    @property
    def is_silent(self) -> bool:
        return self.silent_s > SILENT_S

    def longest_s(self, limit_s: float) -> float:
        """How long there may be no beat."""
        return max(limit_s, _UNSEEN_S) if self._is_seen is None else limit_s

    @property
    def still_s(self) -> float:
        if self.is_silent and self._is_seen is None:
            return 0.0  # as far as one can know
        return self.silent_s + (0.0 if self.beat is None else self.beat.still_s)

    @property
    def collective(self) -> str | None:
        """What it is in."""
        beat = self.beat
        return beat.waits_for if beat is not None and beat.is_in_collective else None

    def __str__(self) -> str:
        beat = self.beat
        if beat is None:
            return f"{self.name} has said nothing so far"
        silent = f", and says nothing any more for {self.silent_s:.0f} s" if self.is_silent else ""
        if beat.is_idle:
            return f"{self.name} has nothing to do{silent}"
        what = "is in no collective" if beat.waits_for is None else f"waits for {beat.waits_for}"
        return f"{self.name} {what}{silent}" + (f", at {beat.frames}" if beat.frames else "")


class HangWatch:
    """Looks once a second, from `start` to `stop`, and calls `ends` once.

    `patience_s`: how long whoever waits for workers has said that it may take, 0 if nothing was
    said, None where nobody waits; `sees_work`: whether the worker of a rank does something, for one
    whose beats do not come; None if that cannot be seen. `reports`: of replicas that share experts.
    """

    def __init__(
        self,
        ranks: range,
        patience_s: Callable[[], float | None],
        sees_work: Callable[[int], bool | None],
        ends: Callable[[Exception], None],
        reports: ReplicaReports | None = None,
    ) -> None:
        self._members = {rank: _Member(f"rank {rank}") for rank in ranks}
        #: the engine core's own thread, where it waits for other replicas
        self._core = _Member("the engine core")
        self._patience_s, self._sees_work, self._ends = patience_s, sees_work, ends
        self._reports = reports
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)

    def start(self) -> None:
        """Other replicas have this one's first report when this returns: it may be stopped at any
        moment from now on."""
        if self._reports is not None:
            self._reports.exchange(self._report(self._patience_s()), 0.0)
        self._thread.start()

    def stop(self) -> None:
        """Returns when `ends` has, unless that calls this."""
        self._stopped.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def locate(self, ranks: range, place: str) -> None:
        """Where workers are, for errors."""
        for rank in ranks:
            self._members[rank].name = f"rank {rank} of {place}"

    def take(self, rank: int, beat: Beat) -> None:
        """The beat of a worker; on any thread."""
        self._members[rank].take(beat)

    def take_core(self, beat: Beat) -> None:
        """Of the engine core's own thread."""
        self._core.take(beat)

    def places(self) -> str:
        """Where all are, for errors."""
        return "; ".join(map(str, self._members.values()))

    def _run(self) -> None:
        before_s = time.monotonic()
        try:
            while not self._stopped.is_set():
                now_s = time.monotonic()
                found = self.look(min(now_s - before_s, LONGEST_LOOK_S))
                before_s = now_s
                if found is not None:
                    raise HangError(found)
                self._stopped.wait(BEAT_S)
        except Exception as error:  # without a watch there may be a hang that nobody ends
            self._ends(error)

    def look(self, passed_s: float) -> str | None:
        """What is wrong, `passed_s` after the last look."""
        patience_s = self._patience_s()
        for rank, member in self._members.items():
            if patience_s is None:
                member.silent_s = 0.0
            else:
                member.pass_over(passed_s, partial(self._sees_work, rank))
        own = self._report(patience_s)
        if self._reports is not None:
            reports = self._reports.exchange(own, passed_s)
        else:
            reports = [] if patience_s is None else [own]
        wrong = self._wrong(own, reports) if reports else None
        if wrong is None:
            return None
        what, limit_s = wrong
        places = "; ".join(place for report in reports for place in report.places)
        more = "if that may take longer, set VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
        return f"{what}, for {limit_s:g} s: {places}; {more}"

    def _wrong(self, own: Report, reports: Sequence[Report]) -> tuple[str, float] | None:
        """What, and for how long."""
        step_s = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS or 0.0
        limit_s = max(HANG_S, step_s, *(one.patience_s for one in reports))
        allowed_s = {rank: one.longest_s(limit_s) for rank, one in self._members.items()}
        if lost := [rank for rank, s in allowed_s.items() if self._members[rank].silent_s >= s]:
            return f"{_ranks(lost)} {_do(lost)} not go on", min(allowed_s[rank] for rank in lost)
        if lost := [rank for rank, one in enumerate(reports) if one.silent_s >= limit_s]:
            replicas = f"replica{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
            return f"{replicas} {_do(lost)} not go on", limit_s
        if len({one.all_in for one in reports}) == 1 and own.all_in is not None:
            limit_s = max(SLOW_S, limit_s)
        if max(one.waits_s for one in reports) < limit_s:
            return None
        if min(one.still_s for one in reports) < limit_s:
            return None
        return "no worker goes on", limit_s

    def _report(self, patience_s: float | None) -> Report:
        members = list(self._members.values())
        inside = {one.collective for one in members}
        all_in = inside.pop() if len(inside) == 1 else None
        places = [str(one) for one in members]
        if self._reports is not None:
            members.append(self._core)
            if self._core.collective is not None:
                all_in = None
                places.append(str(self._core))
        waits_s = max((one.still_s for one in members if one.collective is not None), default=0.0)
        still_s = min(one.still_s for one in members)
        return Report(waits_s, still_s, places, all_in, patience_s or 0.0)


def _ranks(ranks: Sequence[int]) -> str:
    several = "s" * (len(ranks) > 1)
    return f"the worker{several} of rank{several} {', '.join(map(str, ranks))}"


def _do(ranks: Sequence[int]) -> str:
    return "do" if len(ranks) > 1 else "does"
