# SPDX-License-Identifier: Apache-2.0
"""A reference as the kernel of a platform that has no other."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from vllm import decisions

P = ParamSpec("P")


def slow_reference(run: Callable[P, None], what: str) -> Callable[P, None]:
    """`run`; each engine that comes here gets a record that `what` is slow."""

    @wraps(run)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> None:
        why = "there are no C++ kernels for it; this is slow, token by token"
        decisions.record(what, "reference in torch", why)
        run(*args, **kwargs)

    return recorded
