# SPDX-License-Identifier: Apache-2.0
"""The files of running requests: claimed at the start, complete or absent at the end."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import file_lock
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.paths import PathRefused
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.spool import Spool
from vllm.logger import init_logger

logger = init_logger(__name__)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class Target:
    """A running request's file: `path`, and `partial`, where its data lies until it is complete.
    `lock_fd` holds its lock (None: locks are off)."""

    path: str
    partial: str
    lock_fd: int | None


class Storage:
    """Files below `root`, which is trusted; links below it are never followed.

    A path that was claimed holds the rows of the request that claimed it, or nothing.
    """

    def __init__(self, root: str, use_lock: bool) -> None:
        self._root = root
        self._use_lock = use_lock
        self._spool = Spool(root)

    def claim(self, path: str, num_bytes: int) -> Target:
        """Take `path`, which is below the root, for one request; what it held is removed.

        PathRefused when it is taken, or when it is a link or anything but a regular file; OSError
        when it cannot be written or `num_bytes` have no room.
        """
        with self._directory(path, make=True) as (dir_fd, name):
            _check_regular(path, name, dir_fd)
            lock_name = file_lock.lock_path(name)
            lock_fd = self._acquire(path, lock_name, dir_fd) if self._use_lock else None
            partial = None
            try:
                partial = self._create(path, num_bytes)
                _unlink(name, dir_fd)
            except BaseException:
                if partial is not None:
                    self._spool.release(partial)
                if lock_fd is not None:
                    _unlink(lock_name, dir_fd)
                    file_lock.release(lock_fd)
                raise
        return Target(path, partial, lock_fd)

    @staticmethod
    def _acquire(path: str, lock_name: str, dir_fd: int) -> int:
        try:
            return file_lock.acquire(lock_name, dir_fd)
        except BlockingIOError as error:
            raise PathRefused(f"{path} is in use by another request or a reader") from error

    def _create(self, path: str, num_bytes: int) -> str:
        try:
            return self._spool.create(os.path.relpath(path, self._root), num_bytes)
        except FileExistsError as error:
            raise PathRefused(f"{path} is in use by another request") from error

    def publish(self, target: Target) -> None:
        """Give complete data its name and free its lock.

        OSError or PathRefused if that is impossible by now; the target must then be dropped.
        """
        with self._directory(target.path, make=False) as (dir_fd, name):
            os.rename(target.partial, name, dst_dir_fd=dir_fd)
        self._spool.release(target.partial)
        file_lock.release(target.lock_fd)

    def drop(self, target: Target, promised: bool) -> None:
        """Give a path up. Its lock file stays for readers if a reply has `promised` the path."""
        self._spool.release(target.partial)
        if target.lock_fd is not None and not promised:
            try:
                with self._directory(target.path, make=False) as (dir_fd, name):
                    _unlink(file_lock.lock_path(name), dir_fd)
            except (OSError, PathRefused) as error:
                logger.error("cannot remove the lock file of %s: %s", target.path, error)
        file_lock.release(target.lock_fd)

    @contextmanager
    def _directory(self, path: str, make: bool) -> Iterator[tuple[int, str]]:
        """Descriptor of the directory that `path` lies in, and its name there."""
        *parts, name = os.path.relpath(path, self._root).split(os.sep)
        if make:
            os.makedirs(self._root, exist_ok=True)
        fd = os.open(self._root, _DIRECTORY)
        device = os.fstat(fd).st_dev
        try:
            for part in parts:
                fd = _enter(fd, part, path, make)
            if os.fstat(fd).st_dev != device:
                raise PathRefused(f"{path} is on another file system than {self._root}")
            yield fd, name
        finally:
            os.close(fd)


def _enter(parent: int, name: str, path: str, make: bool) -> int:
    """Descriptor of a directory in `parent`, which is closed if that succeeds."""
    if make:
        try:
            os.mkdir(name, dir_fd=parent)
        except FileExistsError:
            pass
    try:
        fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise PathRefused(f"{path}: {name} is a link or no directory") from error
        raise
    os.close(parent)
    return fd


def _check_regular(path: str, name: str, dir_fd: int) -> None:
    try:
        mode = os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise PathRefused(f"{path} is a link, a directory or a device, not a regular file")


def _unlink(name: str, dir_fd: int) -> None:
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
