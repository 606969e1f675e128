# SPDX-License-Identifier: Apache-2.0
"""TCP ports for servers of tests that run at the same time."""

from __future__ import annotations

import itertools
import os
import socket

#: below the range from which the system takes ports of outgoing connections
_FIRST, _PER_WORKER = 20000, 2000


def _worker() -> int:
    """Number of this pytest-xdist worker, 0 without."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


_candidates = itertools.cycle(range(_PER_WORKER))
# Test runs on one machine start at different places.
_offset = os.getpid() % _PER_WORKER


def free_port() -> int:
    """A port of 127.0.0.1 that nothing uses, and that no other call returns soon.

    A port that the system picks may be picked again between its probe and its use.
    """
    first = _FIRST + _worker() % 5 * _PER_WORKER
    for step in itertools.islice(_candidates, _PER_WORKER):
        port = first + (_offset + step) % _PER_WORKER
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")
