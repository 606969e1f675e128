# SPDX-License-Identifier: Apache-2.0
"""What actors do, seen by another process of their Ray node: one that is stopped says nothing."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayError

from vllm.utils.activity import Activity
from vllm.utils.silence import SILENT_S


class RayWitness:
    """The class of the actors that look at others, one per Ray node."""

    def __init__(self) -> None:
        self._activities: dict[int, Activity] = {}

    def sees_work(self, pid: int) -> bool:
        """Whether a process of this node has done something since the last question."""
        if pid not in self._activities:
            self._activities[pid] = Activity(pid)
        return self._activities[pid].is_seen()


class Sight:
    """What a `witness`, an actor of `RayWitness`, sees of a process of its node."""

    def __init__(self, witness: Any, pid: int) -> None:
        self._witness, self._pid = witness, pid
        self._question: Any = None
        self._asked_s = 0.0
        self._seen: bool | None = None

    def sees_work(self) -> bool | None:
        """See `Station.sees_work`. Does not wait for an answer: has that to the question before,
        and asks the next one. A witness that does not answer is as silent as the process."""
        try:
            if self._question is not None:
                if not ray.wait([self._question], timeout=0)[0]:
                    return self._seen if time.monotonic() - self._asked_s < SILENT_S else False
                self._seen = ray.get(self._question)
            self._question = self._witness.sees_work.remote(self._pid)
            self._asked_s = time.monotonic()
        except RayError:  # the witness has ended
            self._question = self._seen = None
        return self._seen
