# SPDX-License-Identifier: Apache-2.0
"""Where in the source a running call stands, and what its surroundings say about it."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any

import torch
import triton

from vllm.compilation import graph_break, piecewise
from vllm.compilation.graph_safety.sources import parsed
from vllm.compilation.graph_safety.walker import Finding
from vllm.kernels import registry

#: files and folders whose frames are the machinery's, not the caller's
_MACHINERY = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(triton.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(__file__)), "device") + os.sep,
    piecewise.__file__,
    graph_break.__file__,
    registry.__file__,
    contextlib.__file__,
    functools.__file__,
    warnings.__file__,
)
#: what is too long to be shown
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


if sys.version_info >= (3, 11):

    def _region(code: CodeType, instruction: int) -> tuple[int, int, int, int]:
        """See `Spot.region`."""
        place = next(islice(code.co_positions(), instruction // 2, None))
        first = place[0] or code.co_firstlineno
        return first, place[1] or first, place[2] or 0, place[3] or 0

    def qualified_name(code: CodeType) -> str:
        """Of a function, with its class."""
        return code.co_qualname

else:

    def _region(code: CodeType, instruction: int) -> tuple[int, int, int, int]:
        """See `Spot.region`: of Python 3.10, which knows lines only, the line's first statement."""
        lines = (n for start, end, n in code.co_lines() if start <= instruction < end and n)
        line = next(lines, code.co_firstlineno)
        text = linecache.getline(code.co_filename, line)
        column = len(text) - len(text.lstrip())
        return line, line, column, column

    def qualified_name(code: CodeType) -> str:
        """Of a function; Python 3.10 does not know its class."""
        return code.co_name


@dataclass(frozen=True)
class Spot:
    """An instruction of a function; `module` is the function's."""

    code: CodeType
    instruction: int
    module: str

    @property
    def path(self) -> str:
        return self.code.co_filename

    @property
    def region(self) -> tuple[int, int, int, int]:
        """First line, last line, first column, end column; columns from 0."""
        return _region(self.code, self.instruction)

    def finding(self, hazard: int, message: str) -> Finding:
        line, end, column, end_column = self.region
        node = self._node()
        text = "" if node is None or isinstance(node, _DEFINITIONS) else ast.unparse(node)
        function = f"{self.module}.{qualified_name(self.code)}"
        return Finding(self.path, line, column + 1, hazard, message, function, text)

    def _node(self) -> ast.AST | None:
        return next(iter(self.surroundings()), None)

    def surroundings(self) -> list[ast.AST]:
        """The expression or statement of the instruction, then what it is part of, outwards."""
        tree = parsed(self.path)
        if tree is None:
            return []
        found = list(_around(tree, self.region))
        return found[::-1]


def _around(tree: ast.AST, region: tuple[int, int, int, int]) -> Iterator[ast.AST]:
    """Nodes that contain a region, outermost first."""
    line, end, column, end_column = region
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.stmt | ast.expr):
            # Keywords, arguments and the like only hold expressions.
            yield from _around(node, region)
            continue
        starts = (node.lineno, node.col_offset)
        ends = (node.end_lineno or 0, node.end_col_offset or 0)
        if starts <= (line, column) and (end, end_column) <= ends:
            yield node
            yield from _around(node, region)


def spot_in(function: Callable[..., Any], text: str) -> Spot:
    """The first line of a function that has `text`. ValueError where none has it."""
    assert isinstance(function, FunctionType)
    lines, first = inspect.getsourcelines(function)
    number = next((n for n, line in enumerate(lines, first) if text in line), None)
    if number is None:
        raise ValueError(f"{function.__qualname__} has no {text!r}")
    code = function.__code__
    starts = (start for start, _, line in code.co_lines() if line == number)
    return Spot(code, next(starts, 0), function.__module__)


def is_machinery(path: str) -> bool:
    """Whether a file is torch's, Triton's or the machinery's: then its caller is to be named."""
    return path.startswith(_MACHINERY)


def here() -> Spot:
    """The innermost running call that is not the machinery's."""
    return spot_of_frame(sys._getframe(1))


def spot_of_frame(innermost: FrameType) -> Spot:
    """The innermost call from a frame outwards that is not the machinery's."""
    frame = innermost
    while frame.f_back is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return Spot(frame.f_code, frame.f_lasti, str(frame.f_globals.get("__name__", "")))


def spot_of_error(error: BaseException) -> Spot:
    """Where an error was raised, or what called the machinery that raised it."""
    frames = [(entry.tb_frame, entry.tb_lasti) for entry in _entries(error.__traceback__)]
    own = [pair for pair in frames if not is_machinery(pair[0].f_code.co_filename)]
    frame, instruction = (own or frames)[-1]
    return Spot(frame.f_code, instruction, str(frame.f_globals.get("__name__", "")))


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def running_functions() -> Iterator[str]:
    """Names of the functions that run, innermost first."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        yield frame.f_code.co_name
        frame = frame.f_back
