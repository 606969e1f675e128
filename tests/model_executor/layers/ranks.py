# SPDX-License-Identifier: Apache-2.0
"""Layers as one rank of several has them, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.distributed import parallel_state


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Inside the block layers are built as this rank of a tensor-parallel group builds them; what
    they compute after it is their part alone: there is nobody to communicate with."""
    groups = parallel_state._groups
    own, groups.tp = groups.tp, parallel_state.GroupCoordinator(tuple(range(size)), rank)
    try:
        yield
    finally:
        groups.tp = own
