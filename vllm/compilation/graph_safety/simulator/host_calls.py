# SPDX-License-Identifier: Apache-2.0
"""What the host calls while a run is recorded: calls that no captured step may make, and functions
that read a name whose module has bound it anew."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner

from vllm import decisions
from vllm.compilation.graph_safety.simulator.spots import (
    Spot,
    is_machinery,
    qualified_name,
    spot_of_error,
    spot_of_frame,
)
from vllm.compilation.graph_safety.sources import definition_of_code, imported_names
from vllm.compilation.graph_safety.walker import Finding

Report = Callable[[int, Spot, str], None]

_WAITS = "the host waits for the device"
#: hazard and message, by code. Codes are known by their identity: a hash reads all of a code, and a
#: run calls functions by the hundred thousand.
_CALLS: dict[int, tuple[CodeType, int, str]] = {
    id(function.__code__): (function.__code__, hazard, message)
    for hazard, message, functions in (
        (
            13,
            "the current device changes inside a step",
            (torch.cuda.set_device, torch.accelerator.set_device_index),
        ),
        (
            14,
            _WAITS,
            (
                torch.cuda.synchronize,
                torch.cuda.Stream.synchronize,
                torch.cuda.Event.synchronize,
                torch.cpu.synchronize,
                torch.accelerator.synchronize,
            ),
        ),
        (25, "torch.compile inside a step", (torch.compile,)),
        (25, "a kernel is compiled inside a step", (triton.compile,)),
        (25, "a kernel's variants are timed inside a step", (Autotuner.run,)),
    )
    for function in functions
}
_GRAPH = torch.cuda.graph.__init__.__code__
_WAITING = (torch.Stream, torch.Event)


class HostCalls:
    """`report` takes what is found."""

    def __init__(self, report: Report) -> None:
        self._report = report
        #: functions that ran and may: each code, with its globals
        self._ran: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self._found: set[Spot] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the block calls of this thread are seen; where a profiler sees them already, that
        is recorded instead."""
        if sys.getprofile() is not None:
            decisions.record("graph-check: calls of the host", "not seen", "a profiler sees them")
            yield
            return
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def ended_by(self, error: BaseException) -> bool:
        """Whether an error is of a call that was found: without a GPU some of them raise."""
        return spot_of_error(error) in self._found

    def stale_imports(self) -> Iterator[Finding]:
        """Names that functions which ran take from another module, by value, and that are bound to
        something else there by now (27)."""
        for code, names in self._ran.values():
            path = code.co_filename
            imported = {} if is_machinery(path) else imported_names(path)
            for name in set(code.co_names) & set(imported):
                module, there = imported[name]
                now = vars(sys.modules[module]) if module in sys.modules else {}
                if name in names and there in now and now[there] is not names[name]:
                    yield from _reads_of(name, code, f"{module}.{there}", names)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if id(frame.f_code) not in self._ran:
                self._called(frame)
        elif event == "c_call" and arg.__name__ == "synchronize":
            if isinstance(arg.__self__, _WAITING):
                self._note(14, _WAITS, frame)

    def _called(self, frame: FrameType) -> None:
        code = frame.f_code
        if id(code) in _CALLS:
            _, hazard, message = _CALLS[id(code)]
            self._note(hazard, message, frame.f_back)
        elif code is not _GRAPH:
            self._ran[id(code)] = (code, frame.f_globals)
        elif frame.f_locals["stream"] is None:
            self._note(13, "a capture without a stream of its own", frame.f_back)

    def _note(self, hazard: int, message: str, frame: FrameType | None) -> None:
        assert frame is not None
        spot = spot_of_frame(frame)
        self._found.add(spot)
        self._report(hazard, spot, message)


def _reads_of(name: str, code: CodeType, origin: str, names: dict[str, Any]) -> Iterator[Finding]:
    node = definition_of_code(code)
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Name) and part.id == name:
            message = f"{origin} has changed since this name was bound to it"
            function = f"{names.get('__name__', '')}.{qualified_name(code)}"
            place = (code.co_filename, part.lineno, part.col_offset + 1)
            yield Finding(*place, 27, message, function, name)
