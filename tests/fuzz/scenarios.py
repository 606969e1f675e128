# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios, each drawn from its own seed, until enough requests were compared."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from tests.fuzz.book import Tally
from tests.fuzz.engines import FAMILIES, forked_cores
from tests.fuzz.leftovers import Holdings, left_since
from tests.fuzz.offline import OfflineSession, run_offline
from tests.fuzz.reference import Reference
from tests.fuzz.served import run_served
from tests.fuzz.threaded import run_threaded

#: how engines are driven, and how often each way comes
WAYS = {"alone": 3, "pair": 2, "served": 3, "threaded": 1}
#: requests per engine and scenario
SCENARIO_SIZE = 60


class Fuzzer:
    """Keeps one reference engine per family, with and without extraction, between scenarios."""

    def __init__(self, size: int = SCENARIO_SIZE) -> None:
        self._size = size
        self._root = tempfile.TemporaryDirectory(prefix="vllm-fuzz-")
        self._references: dict[tuple[str, bool], Reference] = {}
        #: ways that ran once: what a process makes once for all is there
        self._seen: set[tuple[str, bool]] = set()

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *_: object) -> None:
        for reference in self._references.values():
            reference.close()
        self._root.cleanup()

    def run(
        self,
        seed: int,
        way: str | None = None,
        families: list[str] | None = None,
        extracts: bool | None = None,
    ) -> Tally:
        """One scenario, its kind drawn as far as it is not given. The same seed gives the same
        requests and, on engines of this process, the same steps."""
        rng = random.Random(seed)
        way = way or rng.choices(list(WAYS), list(WAYS.values()))[0]
        families = families or rng.choices(FAMILIES, k=2 if way == "pair" else 1)
        extracts = rng.random() < 0.5 if extracts is None else extracts
        references = [self._reference(family, extracts) for family in families]
        before = Holdings.now()
        name = f"seed {seed} {way}"
        storages = [self._storage(extracts) for _ in families]
        size = self._size // len(families)
        if way in ("alone", "pair"):
            tally = self._offline(name, rng, families, references, storages, size)
        elif way == "served":
            with forked_cores():
                tally = run_served(name, rng, families[0], references[0], storages[0], size)
        else:
            with forked_cores():
                tally = run_threaded(name, rng, families[0], references[0], storages[0], size)
        if (way, extracts) in self._seen:
            tally.findings += [f"{name}: left behind: {what}" for what in left_since(before)]
        self._seen.add((way, extracts))
        for reference in references:
            reference.forget()
        return tally

    def _offline(
        self,
        name: str,
        rng: random.Random,
        families: list[str],
        references: list[Reference],
        storages: list[Path | None],
        size: int,
    ) -> Tally:
        sessions = [
            OfflineSession(name, rng, family, reference, storage, size)
            for family, reference, storage in zip(families, references, storages, strict=True)
        ]
        run_offline(rng, sessions)
        tally = Tally()
        for session in sessions:
            tally.add(session.book.tally)
        return tally

    def _storage(self, extracts: bool) -> Path | None:
        return Path(tempfile.mkdtemp(dir=self._root.name)) if extracts else None

    def _reference(self, family: str, extracts: bool) -> Reference:
        key = (family, extracts)
        if key not in self._references:
            self._references[key] = Reference(family, self._storage(extracts))
        return self._references[key]
