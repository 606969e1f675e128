# SPDX-License-Identifier: Apache-2.0
"""Work on a stream of its own: whether it waits for what it reads, and whether anything waits for
it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_WAITS = frozenset({"wait_stream", "wait_event"})


def unordered(function: ast.FunctionDef, block: ast.With, stream: ast.expr) -> str | None:
    """What is missing around a `with torch.cuda.stream(stream)` in a function, None if nothing is.

    A stream that is a parameter is its owner's to order, and an event that is recorded or a stream
    that is handed on is another's to wait for.
    """
    name = ast.unparse(stream)
    if name in {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}:
        return None
    calls = list(_method_calls(function))
    end = block.end_lineno or block.lineno
    waits = [
        call
        for call, method, receiver in calls
        if call.lineno <= end
        and (
            (method in _WAITS and _same(receiver, name))
            or (method == "wait" and _given(call, name))
        )
    ]
    inside = [
        call
        for call, method, receiver in calls
        if method in _WAITS and block.lineno < call.lineno <= end and _is_current(receiver)
    ]
    if not waits and not inside:
        return "work on another stream begins without waiting for what it reads"
    joined = any(
        (method == "wait_stream" and not _same(receiver, name) and _given(call, name))
        or method == "record"
        or (method == "record_event" and _same(receiver, name))
        for call, method, receiver in calls
        if call.lineno > block.lineno
    )
    return None if joined else "nothing waits for the work on another stream"


def _method_calls(function: ast.FunctionDef) -> Iterator[tuple[ast.Call, str, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, node.func.attr, node.func.value


def _same(node: ast.expr, name: str) -> bool:
    return ast.unparse(node) == name


def _given(call: ast.Call, name: str) -> bool:
    return any(_same(arg, name) for arg in call.args)


def _is_current(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("current_stream")
