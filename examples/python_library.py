# SPDX-License-Identifier: Apache-2.0
"""The text that every machine with Python has: its standard library, with a held-out part."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path, PurePath

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def library_root() -> Path:
    """The directory of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def library_files() -> list[Path]:
    """The standard library's source files without its tests, in order of their paths."""
    root = library_root()
    files = sorted(root.rglob("*.py"))
    return [path for path in files if not _SKIPPED & set(path.relative_to(root).parts)]


def is_held_out(relative: PurePath) -> bool:
    """Whether the demo model was not trained on this file: one in twenty, by its path's hash.

    `relative` is the path inside the library (or the repository), so the answer is the same on
    every machine.
    """
    return hashlib.sha256(str(relative).encode()).digest()[0] % 20 == 0
