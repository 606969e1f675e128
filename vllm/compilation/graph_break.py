# SPDX-License-Identifier: Apache-2.0
"""Ops that stay out of piecewise graphs, because what they launch depends on the batch."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, Protocol
from weakref import WeakSet

from vllm.compilation.monitor import is_capturing

P = ParamSpec("P")


class BreakRecorder(Protocol):
    """What a capture does at a break."""

    def run_between(self, call: Callable[..., None], *args: object, **kwargs: object) -> None:
        """End the current graph, run `call`, remember it, begin the next graph."""
        ...


_recorder: ContextVar[BreakRecorder | None] = ContextVar("break_recorder", default=None)


#: every function that `graph_break` has made
_breaks: WeakSet[Callable[..., Any]] = WeakSet()


def is_graph_break(function: Callable[..., Any]) -> bool:
    """Whether a function is decorated with `graph_break`."""
    return function in _breaks


def set_recorder(recorder: BreakRecorder | None) -> BreakRecorder | None:
    """Make breaks report to `recorder` (None: just run); returns the one before."""
    previous = _recorder.get()
    _recorder.set(recorder)
    return previous


def recording_piece() -> bool:
    """True while a graph between breaks is recorded: what depends on the batch may not run here."""
    return _recorder.get() is not None and is_capturing()


def graph_break(function: Callable[P, None]) -> Callable[P, None]:
    """Decorate a function that must run eagerly between two graphs.

    It returns nothing and writes its results into tensors it is given: they lie at fixed addresses,
    which the graphs before and after it read. At a replay it runs again with the very same
    arguments (rows past the step's tokens are padding) in the real step's forward context. A break
    inside a break is part of it.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        recorder = _recorder.get()
        if recorder is None:
            function(*args, **kwargs)
        else:
            recorder.run_between(function, *args, **kwargs)

    _breaks.add(run)
    return run
