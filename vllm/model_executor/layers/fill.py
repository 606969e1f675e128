# SPDX-License-Identifier: Apache-2.0
"""Calls of methods that fill a tensor they are given, which lies at a fixed address."""

from collections.abc import Callable


def fill(run: Callable[..., object], *args: object) -> None:
    """`run(*args)`, which fills `out` among these; TypeError where it returns something, which
    nobody would read."""
    returned = run(*args)
    if returned is not None:
        raise TypeError(
            f"{run.__qualname__} returned a {type(returned).__name__}; it has to fill `out` and "
            "return None"
        )
