# SPDX-License-Identifier: Apache-2.0
"""Connections between the engine cores of all replicas of a server, each with each."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable

_RANK = struct.Struct("<q")
_RETRY_S = 0.02
#: how often who waits for another replica asks whether that is of use
CHECK_S = 0.5


def connect_replicas(
    directory: str, rank: int, size: int, timeout_s: float, check: Callable[[], None]
) -> dict[int, socket.socket]:
    """By rank, a socket to the core of every other replica of `size`, which are connected by the
    same call with the same `directory`. Sockets keep messages apart, and end with their process.

    Raises `TimeoutError`, which names the replicas that did not come within `timeout_s`, and what
    `check` raises, which is called while they are waited for.
    """
    deadline = time.monotonic() + timeout_s
    links: dict[int, socket.socket] = {}
    path = _path(directory, rank)
    listener = _new_socket()
    try:
        listener.bind(path)
        listener.listen(size)
        for other in range(rank):
            links[other] = _connect(_path(directory, other), deadline, check)
            links[other].send(_RANK.pack(rank))
        while len(links) < size - 1:
            while not select.select([listener], [], [], CHECK_S)[0]:
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError
            link, _ = listener.accept()
            _limit(link, deadline)
            links[_RANK.unpack(link.recv(_RANK.size))[0]] = link
    except BaseException as error:
        for link in links.values():
            link.close()
        if isinstance(error, TimeoutError):
            missing = sorted(set(range(size)) - {rank} - links.keys())
            raise TimeoutError(f"{names(missing)} did not start within {timeout_s:g} s") from None
        raise
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    for link in links.values():
        link.settimeout(None)
    return links


def names(ranks: Iterable[int]) -> str:
    """Of replicas, for messages."""
    found = list(ranks)
    return f"replica{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def _path(directory: str, rank: int) -> str:
    return f"{directory}/core-{rank}"


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _connect(path: str, deadline: float, check: Callable[[], None]) -> socket.socket:
    """To a listener that may come later."""
    while True:
        link = _new_socket()
        try:
            link.connect(path)
            return link
        except (FileNotFoundError, ConnectionRefusedError):
            link.close()
            if time.monotonic() > deadline:
                raise TimeoutError from None
            check()
            time.sleep(_RETRY_S)


def _limit(one: socket.socket, deadline: float) -> None:
    one.settimeout(max(0.001, deadline - time.monotonic()))
