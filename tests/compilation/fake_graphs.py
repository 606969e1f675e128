# SPDX-License-Identifier: Apache-2.0
"""Graphs of Python calls: while one is open, `Tape.launch` records instead of running."""

from __future__ import annotations

from collections.abc import Callable

from vllm.compilation.monitor import is_capturing


class Tape:
    """Where launches go, and how many graphs were made."""

    def __init__(self) -> None:
        self.open: FakeGraph | None = None
        self.graphs: list[FakeGraph] = []

    def launch(self, call: Callable[[], object]) -> None:
        """As a kernel launch: runs now, or when the graph that is being recorded is replayed."""
        if self.open is None:
            call()
        else:
            self.open.calls.append(call)

    def new_graph(self) -> FakeGraph:
        return FakeGraph(self)


class FakeGraph:
    """See `vllm.compilation.piecewise.Graph`."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.calls: list[Callable[[], object]] = []

    def begin(self) -> None:
        assert self.tape.open is None and is_capturing()
        self.tape.open = self
        self.tape.graphs.append(self)

    def end(self) -> None:
        assert self.tape.open is self
        self.tape.open = None

    def replay(self) -> None:
        assert self.tape.open is None
        for call in self.calls:
            call()
