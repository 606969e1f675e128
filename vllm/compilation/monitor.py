# SPDX-License-Identifier: Apache-2.0
"""Whether a graph is being captured right now. Ask the function; never import the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_capturing = False


def is_capturing() -> bool:
    """True inside `capturing()`."""
    return _capturing


@contextmanager
def capturing() -> Iterator[None]:
    """Mark a capture; RuntimeError when one is running already."""
    global _capturing
    if _capturing:
        raise RuntimeError("a graph is being captured already")
    _capturing = True
    try:
        yield
    finally:
        _capturing = False
