# SPDX-License-Identifier: Apache-2.0
"""Whether this thread captures a graph right now. Ask the function; never import the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


def is_capturing() -> bool:
    """True inside `capturing()`."""
    return _capturing.get()


@contextmanager
def capturing() -> Iterator[None]:
    """Mark a capture; RuntimeError when one is running already."""
    if _capturing.get():
        raise RuntimeError("a graph is being captured already")
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)
