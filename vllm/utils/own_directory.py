# SPDX-License-Identifier: Apache-2.0
"""Temporary directories of a server, which the next one removes where it was killed with all of its
processes.

Whoever makes one locks a file in it. The lock ends with that process and those that it has forked,
however they end, and says where it was made: other hosts may share the directory around it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile

from vllm.logger import init_logger

logger = init_logger(__name__)

_PREFIX = "vllm-"
_OWNER = "owner"
_BOOT = "/proc/sys/kernel/random/boot_id"
#: path -> the locked file
_locks: dict[str, int] = {}


def make_directory(base: str | None = None) -> str:
    """A directory for this user in `base`, by default that of temporary files, from which those are
    removed whose makers are gone. `remove_directory` removes it. OSError where none can be made."""
    base = base or tempfile.gettempdir()
    _sweep(base)
    path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
    with contextlib.suppress(OSError):  # a file system without locks: nobody will sweep it
        _locks[path] = _lock(path)
    return path


def remove_directory(path: str) -> None:
    """With what is in it; nothing happens where it is gone."""
    if (lock := _locks.pop(path, None)) is not None:
        os.close(lock)
    shutil.rmtree(path, ignore_errors=True)


def _lock(path: str) -> int:
    new = os.path.join(path, f"{_OWNER}.new")
    lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, _host())
        os.rename(new, os.path.join(path, _OWNER))  # nobody sees it without its lock
    except BaseException:
        os.close(lock)
        raise
    return lock


def _sweep(base: str) -> None:
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # no owner's file, one that is locked, another's
                    _remove_left(entry)


def _remove_left(entry: os.DirEntry[str]) -> None:
    if entry.stat(follow_symlinks=False).st_uid != os.getuid():
        return
    owner = os.open(os.path.join(entry.path, _OWNER), os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.read(owner, 200) == _host():
            shutil.rmtree(entry.path, ignore_errors=True)
            logger.info("removed %s of a server that was killed", entry.path)
    finally:
        os.close(owner)


def _host() -> bytes:
    """This machine, since it was started."""
    with contextlib.suppress(OSError), open(_BOOT, "rb") as file:
        return file.read()
    return platform.node().encode()
