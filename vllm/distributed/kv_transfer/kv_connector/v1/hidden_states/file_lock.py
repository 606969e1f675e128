# SPDX-License-Identifier: Apache-2.0
"""The lock file beside a data file: `<path>.lock`, held with flock(2) until it is complete."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: readers of other users may open data and locks, only the server's user may write
FILE_MODE = 0o644


def lock_path(path: str) -> str:
    return f"{path}.lock"


def acquire(path: str) -> int:
    """Create the lock of `path` and hold it; returns the descriptor that holds it.

    Raises BlockingIOError when someone else holds it (two requests with one custom path): waiting
    here would stop every other request.
    """
    fd = os.open(lock_path(path), os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def release(fd: int | None) -> None:
    """Let waiting readers go on; the lock file stays, its readers remove it.

    Unlocks explicitly, so that a forgotten duplicate of `fd` cannot keep readers waiting.
    """
    if fd is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Wait until the writer of `path` is done. FileNotFoundError when there is no lock file."""
    try:
        fd = os.open(lock_path(path), os.O_RDONLY)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no lock file {lock_path(path)}: the request is unknown, its files were cleaned up, "
            "or the server runs with use_synchronization_lock=false (then load the file directly)"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)
