# SPDX-License-Identifier: Apache-2.0
"""What a process holds, so that nothing of an engine is left after its end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: threads and processes need a moment to end
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Holdings:
    """Open files by what they are, threads by name (numbers off), child processes."""

    files: Counter[str]
    threads: Counter[str]
    children: int

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        names = (thread.name.rstrip("0123456789-_ ") for thread in threading.enumerate())
        children = len(multiprocessing.active_children())
        return cls(Counter(_open_files()), Counter(names), children)

    def more_than(self, before: Holdings) -> list[str]:
        """What there is now and was not before."""
        found = [f"{n} more open: {name}" for name, n in (self.files - before.files).items()]
        found += [f"{n} more threads {name}" for name, n in (self.threads - before.threads).items()]
        if self.children > before.children:
            found.append(f"{self.children - before.children} more child processes")
        return found


def left_since(before: Holdings) -> list[str]:
    """What is still held more than before, once it has had time to go."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := Holdings.now().more_than(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def files_in(directory: Path, may_stay: Callable[[str, set[str]], bool]) -> list[str]:
    """Every file below a directory that stays there, but for those that may: asked with a file's
    name and the names of all."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        names = {str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir()}
        found = [name for name in names if not may_stay(name, names)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _open_files() -> list[str]:
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the descriptor of the listing itself
            continue
        names.append(target.split(":")[0] if ":[" in target else target)
    return names
