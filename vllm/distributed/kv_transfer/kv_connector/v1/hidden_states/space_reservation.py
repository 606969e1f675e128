# SPDX-License-Identifier: Apache-2.0
"""Whether files can be given their space when a request starts.

A full disk is then found while the request can still fail, before a reply promises a file. Where
the file system has no such operation, the C library writes into every page instead, which is too
slow for the step loop.
"""

from __future__ import annotations

import os
import tempfile
import time

from vllm import decisions

_PROBE_BYTES = 4 * 2**20
#: a step may spend this long on reserving 4 MiB (1 GiB/s)
_LIMIT_S = 0.004
_WHAT = "hidden-state file space"


def choose_reservation(directory: str) -> bool:
    """Measure it in `directory` and record the choice."""
    try:
        elapsed_s = min(_probe(directory) for _ in range(3))
    except OSError as error:
        decisions.record(
            _WHAT, "reserved at a request's start", f"not measured: {error.strerror or error}"
        )
        return True
    figure = f"reserving 4 MiB takes {elapsed_s * 1e3:.2f} ms in {directory}"
    if elapsed_s > _LIMIT_S:
        decisions.record(_WHAT, "allocated while writing", figure, "reserved at a request's start")
        return False
    decisions.record(_WHAT, "reserved at a request's start", figure)
    return True


def _probe(directory: str) -> float:
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        start = time.perf_counter()
        os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
        return time.perf_counter() - start
