# SPDX-License-Identifier: Apache-2.0
"""Numbers that processes count together."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from vllm.entrypoints.tally import Counted, Tallies


def views(path: Path, num: int) -> list[Tallies]:
    """As many processes would see the numbers."""
    return [Tallies(str(path), num, place) for place in range(num)]


def test_a_limit_holds_for_all_processes(tmp_path: Path) -> None:
    first, second, third = (view.of(Counted.GENERATING) for view in views(tmp_path / "n", 3))
    assert first.try_enter(3) and second.try_enter(3) and first.try_enter(3)
    assert not third.try_enter(3) and not first.try_enter(3)
    assert first.total == second.total == third.total == 3
    second.leave()
    assert third.try_enter(3) and not second.try_enter(3)


def test_kinds_are_counted_apart_and_a_dead_process_is_forgotten(tmp_path: Path) -> None:
    first, second = views(tmp_path / "n", 2)
    for kind in Counted:
        for _ in range(kind + 1):
            first.of(kind).enter()
        second.of(kind).enter()
    assert [second.of(kind).total for kind in Counted] == [2, 3, 4]
    Tallies(str(tmp_path / "n"), 2).clear(0)
    assert [second.of(kind).total for kind in Counted] == [1, 1, 1]


def test_one_process_counts_by_itself() -> None:
    tallies, other = Tallies(), Tallies()
    tally = tallies.of(Counted.LOAD)
    assert tally.try_enter(1) and not tally.try_enter(1)
    assert tallies.of(Counted.LOAD).total == 1 and other.of(Counted.LOAD).total == 0
    tally.leave()
    assert tally.total == 0


def _enter_many(path: str, place: int, limit: int) -> None:
    tally = Tallies(path, 3, place).of(Counted.GENERATING)
    for _ in range(300):
        tally.try_enter(limit)


def _die_with_the_lock(path: str) -> None:
    Tallies(path, 3).locked().__enter__()
    multiprocessing.current_process().kill()


@pytest.mark.parametrize("limit", [100, 5000])
def test_processes_at_once_never_exceed_the_limit(tmp_path: Path, limit: int) -> None:
    path = str(tmp_path / "n")
    context = multiprocessing.get_context("fork")
    # A process that dies while it looks at the limit stops nobody.
    dead = context.Process(target=_die_with_the_lock, args=(path,))
    dead.start()
    dead.join()
    running = [context.Process(target=_enter_many, args=(path, i, limit)) for i in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert Tallies(path, 3).total(Counted.GENERATING) == min(limit, 900)
