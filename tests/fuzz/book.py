# SPDX-License-Identifier: Apache-2.0
"""Who asked for what, what came of it, and what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.leftovers import files_in
from tests.fuzz.reference import Reference, differences, prefix_differences, take_result
from tests.fuzz.workload import Conditions, Spec
from vllm import RequestOutput
from vllm.sampling_params import RequestOutputKind


@dataclass
class Tally:
    """What a run has seen so far."""

    requests: int = 0
    compared: int = 0
    ended_early: int = 0
    rows: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.requests += other.requests
        self.compared += other.compared
        self.ended_early += other.ended_early
        self.rows += other.rows
        self.findings += other.findings

    def __str__(self) -> str:
        return (
            f"{self.requests} requests: {self.compared} compared whole, {self.ended_early} ended "
            f"early and compared so far, {self.rows} hidden rows; {len(self.findings)} findings"
        )


@dataclass
class Book:
    """The requests of one engine. `name` says in findings which engine it was."""

    name: str
    reference: Reference
    tally: Tally = field(default_factory=Tally)
    live: dict[str, tuple[Spec, Conditions]] = field(default_factory=dict)
    #: requests whose end is to be compared
    #: requests that ended early
    _gone: set[str] = field(default_factory=set)
    _unread: list[tuple[str, Spec, Conditions, RequestOutput]] = field(default_factory=list)
    #: what has come of each live request
    _so_far: dict[str, RequestOutput] = field(default_factory=dict)

    def finding(self, what: str) -> None:
        self.tally.findings.append(f"{self.name}: {what}")

    def begin(self, request_id: str, spec: Spec, conditions: Conditions) -> None:
        self.reference.result(spec)
        self.tally.requests += 1
        self.live[request_id] = (spec, conditions)

    def take(self, request_id: str, output: RequestOutput) -> None:
        """An output as it came; its request may end with it."""
        _, conditions = self.live[request_id]
        merged = self._so_far.setdefault(request_id, output)
        if merged is not output:
            merged.add(output, conditions.output_kind is RequestOutputKind.DELTA)
        if not output.finished:
            return
        merged.outputs.sort(key=lambda completion: completion.index)
        if any(completion.finish_reason == "abort" for completion in merged.outputs):
            self.left(request_id)
        else:
            self._unread.append((request_id, *self.live.pop(request_id), merged))
            del self._so_far[request_id]

    def left(self, request_id: str) -> None:
        """The request ends with what has come: aborted, refused, or its client is gone."""
        spec, _ = self.live.pop(request_id)
        self._gone.add(request_id)
        self.tally.ended_early += 1
        output = self._so_far.pop(request_id, None)
        if output is not None:
            self._check_beginning(request_id, spec, output)

    def settle(self) -> None:
        """Compare what has ended. An engine of this process stores rows while it is stepped, so
        that it must have had its last step."""
        for ended in self._unread:
            self._compare(*ended)
        self._unread.clear()

    def _compare(
        self, request_id: str, spec: Spec, conditions: Conditions, output: RequestOutput
    ) -> None:
        expected = self.reference.result(spec)
        try:
            got = take_result(output, self.reference.extracts)
        except Exception as error:
            self.finding(f"{request_id}: its rows cannot be read: {error!r}")
            return
        self.tally.compared += 1
        self.tally.rows += 0 if got.rows is None else len(got.rows)
        for found in differences(spec, expected, got):
            self.finding(f"{request_id}: {found}; {spec}, {conditions}")

    def check_storage(self, storage: Path) -> None:
        """After the engine's end: every file was told to somebody, who has removed it. A request
        that ended in the engine before its abort came there has a whole file nobody heard of."""
        files = set(files_in(storage, self._is_late))
        if files:
            self.finding(f"files nobody was told of: {sorted(files)[:4]} of {len(files)}")

    def _is_late(self, name: str, names: set[str]) -> bool:
        request_id, _, _ = name.partition("-")
        data = name.removesuffix(".lock")
        return request_id in self._gone and {data, f"{data}.lock"} <= names

    def _check_beginning(self, request_id: str, spec: Spec, output: RequestOutput) -> None:
        for found in prefix_differences(self.reference.result(spec), output):
            self.finding(f"{request_id}, ended early: {found}; {spec}")
