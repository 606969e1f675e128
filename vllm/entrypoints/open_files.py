# SPDX-License-Identifier: Apache-2.0
"""Room for many connections: each one is an open file."""

from __future__ import annotations

import resource

from vllm import decisions

#: what a server of tens of thousands of streams needs; systems often start processes with 1,024
_WANTED = 65536


def raise_open_file_limit() -> None:
    """Lift the soft limit of this process towards the hard one, which only root may pass."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    decisions.PROCESS.record("open file limit", wanted, "every connection is an open file", soft)
