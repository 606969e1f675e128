# SPDX-License-Identifier: Apache-2.0
"""Tests: device values in them, and what they say of whether a graph is being captured."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm.compilation.graph_safety.values import (
    Capturing,
    Host,
    Items,
    Known,
    Value,
    is_array,
    join,
    join_all,
    tags_of,
)
from vllm.compilation.graph_safety.walker import Body, Mode


class Conditions(Body):
    """The tests of a function."""

    def condition(self, node: ast.expr, hazard: int, message: str) -> Value:
        """A test; a device value in it is a hazard, also behind `not`, `and` and `or`."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return negated(self.condition(node.operand, hazard, message))
        if isinstance(node, ast.BoolOp):
            found = self._in_turn(node, lambda part: self.condition(part, hazard, message))
            joined = _of_parts(node, found)
            return joined if isinstance(joined, Capturing) else Host()
        value = self.told(node)
        device = is_array(value) and not isinstance(value, Items)
        if device or (isinstance(value, Host) and "device" in value.tags):
            self.report(hazard, node, message)
        return value

    @contextmanager
    def where(self, test: Value, outcome: bool) -> Iterator[None]:
        """For what runs where a test has an outcome: outside graphs, if it never has it inside."""
        before = self.mode
        if isinstance(test, Capturing) and test.inside is not outcome:
            self.mode = Mode.STEP
        yield
        self.mode = before

    def negation(self, node: ast.UnaryOp) -> Value:
        operand = self.told(node.operand)
        if is_array(operand) and not isinstance(operand, Items):
            self.report(5, node, "`not` asks for a device value")
        return negated(operand)

    def of_all_or_any(self, node: ast.BoolOp) -> Value:
        def each(part: ast.expr) -> Value:
            value = self.told(part)
            if part is not node.values[-1] and is_array(value) and not isinstance(value, Items):
                self.report(5, part, "`and` and `or` ask for a device value")
            return value

        return _of_parts(node, self._in_turn(node, each))

    def choice(self, node: ast.IfExp) -> Value:
        test = self.condition(node.test, 5, "the choice depends on a device value")
        if isinstance(test, Known) and isinstance(test.object, bool):
            return self.told(node.body if test.object else node.orelse)
        with self.where(test, True):
            body = self.told(node.body)
        with self.where(test, False):
            return join(body, self.told(node.orelse))

    def _in_turn(self, node: ast.BoolOp, each: Callable[[ast.expr], Value]) -> list[Value]:
        """What `each` gives for the parts: after one that decides, the others are not asked."""
        found: list[Value] = []
        decided: Value = Host()
        for part in node.values:
            with self.where(decided, isinstance(node.op, ast.And)):
                found.append(each(part))
            if found[-1] == _deciding(node):
                decided = found[-1]
        return found


def _deciding(node: ast.BoolOp) -> Capturing:
    """The part after which no other counts, inside graphs."""
    return Capturing(isinstance(node.op, ast.Or))


def _of_parts(node: ast.BoolOp, parts: list[Value]) -> Value:
    return _deciding(node) if _deciding(node) in parts else join_all(parts)


def negated(value: Value) -> Value:
    if isinstance(value, Known) and isinstance(value.object, bool):
        return Known(not value.object)
    if isinstance(value, Capturing):
        return Capturing(not value.inside)
    return Host(tags_of(value) & {"device"})
