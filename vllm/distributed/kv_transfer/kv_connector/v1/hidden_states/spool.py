# SPDX-License-Identifier: Apache-2.0
"""Where files lie until they are complete, and what servers that were killed left there.

    <root>/.incomplete-<uid>/<server>.lock         held with flock(2) while the server lives
    <root>/.incomplete-<uid>/<server>/<relative>   to become <root>/<relative>

The relative path says which lock file beside the final name belongs to a dead server. Nothing is
there while no request runs.
"""

import errno
import fcntl
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm import decisions
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states import file_lock, tensor_file
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.paths import (
    INCOMPLETE,
    LOCK_SUFFIX,
    PathRefused,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

#: how often another server may remove what it takes for a dead one's, while we make it
_ATTEMPTS = 5
#: flock(2) on a file system without it
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Spool:
    """One server's incomplete files. Used from the step thread and from writers."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._base = os.path.join(root, f"{INCOMPLETE}{os.geteuid()}")
        self._server = os.path.join(self._base, uuid.uuid4().hex)
        self._lock_fd: int | None = None
        self._num_files = 0
        self._mutex = threading.Lock()

    def create(self, relative: str, num_bytes: int) -> str:
        """A new file with `num_bytes` reserved, and its path; `release` gives it back.

        FileExistsError while another request writes to `relative`; OSError when there is no room.
        """
        path = os.path.join(self._server, relative)
        with self._mutex:
            try:
                if not self._num_files:
                    self._make()
                self._create(path, num_bytes)
            except OSError:
                if not self._num_files:
                    self._remove()
                raise
            self._num_files += 1
        return path

    def _create(self, path: str, num_bytes: int) -> None:
        try:
            tensor_file.create(path, num_bytes)
        except FileNotFoundError:
            if not os.path.isdir(self._server):  # a client cleaned the whole storage directory
                self._make()
            os.makedirs(os.path.dirname(path), exist_ok=True)
            tensor_file.create(path, num_bytes)

    def release(self, path: str) -> None:
        """A file has got its name, or is not wanted any more."""
        with self._mutex:
            self._num_files -= 1
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.error("cannot remove %s: %s", path, error.strerror)
            if not self._num_files:
                self._remove()

    def _make(self) -> None:
        if self._lock_fd is not None:
            self._remove()
        os.makedirs(self._root, exist_ok=True)
        for _ in range(_ATTEMPTS):
            try:
                _make_directory(self._base)
                self._lock_fd = _acquire(self._server)
                os.mkdir(self._server, 0o700)
                break
            except (BlockingIOError, FileNotFoundError):
                self._remove()
        else:
            raise OSError(errno.EAGAIN, "another server removes it again and again", self._base)
        if os.lstat(self._base).st_uid != os.lstat(self._server).st_uid:
            self._remove()
            raise PermissionError(errno.EPERM, "it belongs to another user", self._base)

    def _remove(self) -> None:
        fd, self._lock_fd = self._lock_fd, None
        _remove_server(self._server)
        if fd is not None:
            os.close(fd)


def remove_leftovers(root: str) -> None:
    """Remove what servers of this user that are dead left incomplete below `root`."""
    base = os.path.join(root, f"{INCOMPLETE}{os.geteuid()}")
    try:
        names = os.listdir(base)
    except OSError:
        return
    for name in names:
        server, suffix = os.path.splitext(os.path.join(base, name))
        if suffix != LOCK_SUFFIX or (fd := _lock_if_free(f"{server}{suffix}")) is None:
            continue
        num_files = _remove_locks(root, server)
        _remove_server(server)
        os.close(fd)
        logger.info("removed %d incomplete files that a dead server left in %s", num_files, root)


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if os.path.islink(path):
            raise


def _acquire(server: str) -> int | None:
    base, name = os.path.split(file_lock.lock_path(server))
    dir_fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return file_lock.acquire(name, dir_fd)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        decisions.record(
            "incomplete hidden-state files of dead servers",
            "stay",
            f"{base} is on a file system without file locks",
            "removed at the next start",
        )
        return None
    finally:
        os.close(dir_fd)


def _remove_server(server: str) -> None:
    try:
        os.rmdir(server)
    except FileNotFoundError:
        pass
    except OSError:
        shutil.rmtree(server, ignore_errors=True)
    for remove, path in (
        (os.unlink, file_lock.lock_path(server)),
        (os.rmdir, os.path.dirname(server)),
    ):
        try:
            remove(path)
        except OSError:  # it is not there, or other servers are
            pass


def _lock_if_free(path: str) -> int | None:
    """Hold a lock file; None if there is none, or if its owner lives."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _remove_locks(root: str, server: str) -> int:
    """Remove the lock files of a server's incomplete files; returns how many files there are."""
    num_files = 0
    for directory, _, names in os.walk(server):
        for name in names:
            num_files += 1
            target = os.path.join(root, os.path.relpath(os.path.join(directory, name), server))
            lock = file_lock.lock_path(target)
            if not os.path.lexists(target) and (fd := _lock_if_free(lock)) is not None:
                if not os.path.lexists(target):  # a living server has not completed it meanwhile
                    os.unlink(lock)
                os.close(fd)
    return num_files


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
