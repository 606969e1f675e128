# SPDX-License-Identifier: Apache-2.0
"""Directories of servers that were killed are removed by the next one, and no others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from vllm.utils import own_directory
from vllm.utils.own_directory import make_directory, remove_directory

pytestmark = pytest.mark.usefixtures("forking")

FORK = multiprocessing.get_context("fork")


def make_and_wait(base: str, answer: Connection, forks: bool) -> None:
    path = make_directory(base)
    Path(path, "a-socket").touch()
    child = FORK.Process(target=time.sleep, args=(600,))
    if forks:
        child.start()
    answer.send((path, child.pid if forks else None))
    time.sleep(600)


def made_by_another(base: Path, forks: bool = False) -> tuple[Path, Callable[[], None], int]:
    """The directory, what kills its maker, and the process that the maker has forked."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=make_and_wait, args=(str(base), theirs, forks))
    process.start()
    theirs.close()
    path, child = ours.recv()

    def kill() -> None:
        process.kill()
        process.join()

    return Path(path), kill, child


def left_after_a_start(base: Path) -> list[Path]:
    remove_directory(make_directory(str(base)))
    return sorted(base.iterdir())


def test_of_makers_that_live_and_that_are_killed(tmp_path: Path) -> None:
    (first, kill_first, _), (second, kill_second, _) = (made_by_another(tmp_path) for _ in range(2))
    assert left_after_a_start(tmp_path) == sorted([first, second])
    kill_first()
    assert left_after_a_start(tmp_path) == [second]
    kill_second()
    assert left_after_a_start(tmp_path) == []


def test_what_a_maker_has_forked_uses_its_directory(tmp_path: Path) -> None:
    path, kill, child = made_by_another(tmp_path, forks=True)
    kill()
    assert left_after_a_start(tmp_path) == [path]
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while left_after_a_start(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_not_a_servers_here_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign, kill, _ = made_by_another(tmp_path)
    kill()
    (foreign / "owner").write_bytes(b"another host")
    others = [tmp_path / name for name in ("vllm-mine", "vllm-file", "vllm-link", "mine")]
    others[0].mkdir()
    others[1].touch()
    target = tmp_path / "mine"
    target.mkdir()
    (target / "owner").write_bytes(own_directory._host())
    others[2].symlink_to(target)
    assert left_after_a_start(tmp_path) == sorted([foreign, *others])
    (foreign / "owner").write_bytes(own_directory._host())
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert left_after_a_start(tmp_path) == sorted([foreign, *others])


def test_a_directory_that_is_removed_leaves_no_open_file(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        path = make_directory(str(tmp_path))
        remove_directory(path)
        remove_directory(path)
        assert not os.path.exists(path)
    assert len(os.listdir("/proc/self/fd")) == before
