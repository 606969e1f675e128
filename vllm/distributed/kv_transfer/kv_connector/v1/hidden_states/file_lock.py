# SPDX-License-Identifier: Apache-2.0
"""The lock file beside a data file: `<path>.lock`, held with flock(2) until it is complete."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.paths import (
    LOCK_SUFFIX,
    PathRefused,
)

#: readers of other users may open data and locks, only the server's user may write
FILE_MODE = 0o644
#: how often a reader may remove the lock file between our opening and locking it
_ATTEMPTS = 5


def lock_path(path: str) -> str:
    return f"{path}{LOCK_SUFFIX}"


def acquire(name: str, dir_fd: int) -> int:
    """Create the lock file `name` in a directory and hold it; returns the descriptor that holds it.

    Raises BlockingIOError when someone else holds it (two requests with one custom path): waiting
    here would stop every other request. PathRefused when `name` is a link or no regular file.
    """
    for _ in range(_ATTEMPTS):
        fd = _open(name, dir_fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PathRefused(f"{name} is there and not a regular file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _still_has_name(fd, name, dir_fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise BlockingIOError(errno.EWOULDBLOCK, "its lock file is removed again and again", name)


def _open(name: str, dir_fd: int) -> int:
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(name, flags, FILE_MODE, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise PathRefused(f"{name} is there and not a regular file") from error
        raise


def _still_has_name(fd: int, name: str, dir_fd: int) -> bool:
    """Readers remove lock files: one that they removed would keep nobody out."""
    held = os.fstat(fd)
    try:
        named = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(held, named)


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
