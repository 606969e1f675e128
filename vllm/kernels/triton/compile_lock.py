# SPDX-License-Identifier: Apache-2.0
"""Processes of a host compile each kernel once: the others wait, and read it from Triton's cache.

The locks are files in that cache, so whoever shares it shares them, also two servers. A process
that ends, however it does, lets go of its own.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from triton import knobs

from vllm.logger import init_logger

logger = init_logger(__name__)

_FOLDER = "vllm_locks"


@contextmanager
def compiling(what: str, *, wait: bool) -> Iterator[bool]:
    """Inside the block no other process compiles `what`; False, and nothing is held, if one does
    and this one is not to `wait` for it.

    Where the disk has no locks, every process compiles everything, and the log says so.
    """
    try:
        fd = os.open(_path(what), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        _not_shared(str(error))
        yield True
        return
    try:
        held = _lock(fd, wait)
        yield held
    finally:
        # Closing alone would leave it to a process that was forked meanwhile.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _path(what: str) -> Path:
    folder = Path(knobs.cache.dir) / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / hashlib.sha256(what.encode()).hexdigest()[:32]


def _lock(fd: int, wait: bool) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        _not_shared(str(error))
    return True


@cache
def _not_shared(why: str) -> None:
    logger.warning("kernels are compiled by every process that needs them: %s", why)
