# SPDX-License-Identifier: Apache-2.0
"""What every fuzzed engine has: its options, its requests to come, and the book on them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

from tests.fuzz.book import Book
from tests.fuzz.engines import draw_options, make_config
from tests.fuzz.reference import Reference
from tests.fuzz.workload import Conditions, Spec, SpecPool, Workload

#: how much else happens: parts of what may
DISTURBANCE = (0.1, 0.4, 1.0)
#: seconds after which requests that do not end are a finding
STUCK_S = 120.0


class Session:
    """Everything drawn from `rng` before the engine starts, in one order for all sessions."""

    #: whether the engine may be of several processes
    may_have_ranks: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        rng: random.Random,
        family: str,
        reference: Reference,
        storage: Path | None,
        num_requests: int,
    ) -> None:
        self._rng = rng
        self._storage = storage
        self._num_requests = num_requests
        self._num_sent = 0
        self._disturbance = rng.choice(DISTURBANCE)
        options = draw_options(rng, family, storage is not None, self.may_have_ranks)
        self._width = int(options["max_num_seqs"])
        self._work = Workload(rng, storage is not None, options["scheduling_policy"] == "priority")
        self._pool = SpecPool(rng, self._work, reference, 3 + num_requests // 4)
        self.book = Book(f"{name} {family} {options}", reference)
        self._config = make_config(family, storage, **options)

    def _begin(self, spec: Spec) -> tuple[str, Conditions]:
        """The id and the conditions of a request that is about to be sent, which the book knows."""
        self._num_sent += 1
        request_id = f"r{self._num_sent}"
        conditions = self._work.conditions(spec)
        self.book.begin(request_id, spec, conditions)
        return request_id, conditions
