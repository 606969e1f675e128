# SPDX-License-Identifier: Apache-2.0
"""What expressions are, and the hazards in them."""

from __future__ import annotations

import ast
import builtins
from abc import abstractmethod
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import nn
from triton.runtime.jit import KernelInterface

from vllm.compilation.graph_safety import calls
from vllm.compilation.graph_safety.annotations import import_name
from vllm.compilation.graph_safety.conditions import Conditions
from vllm.compilation.graph_safety.members import attribute
from vllm.compilation.graph_safety.sources import imported_names, rebound_names
from vllm.compilation.graph_safety.values import (
    NO_TAGS,
    UNKNOWN,
    Array,
    Capturing,
    Either,
    Host,
    Instance,
    Items,
    Known,
    Launch,
    Local,
    Value,
    distinct,
    is_array,
    join,
    join_all,
    of_object,
    options,
    tags_of,
)
from vllm.compilation.graph_safety.walker import Finding, Mode, Walker
from vllm.kernels.triton.launcher import Launcher

_MASK_NAMES = ("mask", "_mask")
#: tuples inside tuples; a recursion may nest them without end
_DEEPEST_ITEMS = 4


class Expressions(Conditions):
    """Evaluates the expressions of `function`; hazards go to `findings`."""

    def __init__(
        self,
        walker: Walker,
        function: FunctionType,
        variables: dict[str, Value],
        mode: Mode,
        is_break: bool,
        findings: dict[Finding, Mode],
    ) -> None:
        self.walker = walker
        self.mode = mode
        self.is_break = is_break
        self.variables = variables
        self.function = function
        self.name = function.__name__
        self.module = function.__module__
        self.globals: dict[str, Any] = function.__globals__
        self.given = {}
        self.written = set()
        self._path = function.__code__.co_filename
        self._findings = findings

    def report(self, hazard: int, node: ast.AST, message: str) -> None:
        assert isinstance(node, ast.expr | ast.stmt)
        self.report_in(self.function, hazard, node, message)

    def report_in(
        self, function: FunctionType, hazard: int, node: ast.expr | ast.stmt, message: str
    ) -> None:
        if self.mode is Mode.BUILD:
            return
        where = f"{function.__module__}.{function.__qualname__}"
        code = ast.unparse(node).splitlines()[0]
        place = (function.__code__.co_filename, node.lineno, node.col_offset + 1)
        self._findings.setdefault(Finding(*place, hazard, message, where, code), self.mode)

    def value(self, node: ast.expr | None) -> Value:
        value = self.told(node)
        return Host() if isinstance(value, Capturing) else value

    def told(self, node: ast.expr | None) -> Value:
        match node:
            case None:
                return UNKNOWN
            case ast.Constant():
                return Host()
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                return self.attribute(self.value(node.value), node.attr)
            case ast.Call():
                return calls.call(self, node)
            case ast.Subscript():
                return self._subscript(node)
            case ast.BinOp():
                return self._operation(node)
            case ast.UnaryOp():
                return (
                    self.negation(node)
                    if isinstance(node.op, ast.Not)
                    else self.value(node.operand)
                )
            case ast.Compare():
                return self._compare(node)
            case ast.BoolOp():
                return self.of_all_or_any(node)
            case ast.IfExp():
                return self.choice(node)
            case ast.Tuple() | ast.List() | ast.Set():
                return self._sequence(node.elts)
            case ast.Dict():
                return Items((), join_all([self.value(v) for v in node.values]))
            case ast.JoinedStr():
                for part in node.values:
                    if isinstance(part, ast.FormattedValue) and is_array(self.value(part.value)):
                        self.report(1, part.value, "a tensor is formatted")
                return Host()
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return Items((), self._comprehension(node.generators, node.elt))
            case ast.DictComp():
                return Items((), self._comprehension(node.generators, node.value))
            case ast.Lambda():
                return Local(node, self.variables)
            case ast.NamedExpr():
                value = self.value(node.value)
                self.variables[node.target.id] = value
                return value
            case ast.Starred():
                return self.value(node.value)
            case ast.Await() | ast.Yield() | ast.YieldFrom():
                return self.value(node.value)
            case ast.Slice():
                for bound in (node.lower, node.upper, node.step):
                    self.value(bound)
                return Host()
        return UNKNOWN

    # ---- names and attributes ------------------------------------------------------------------

    def _name(self, node: ast.Name) -> Value:
        name = node.id
        if name in self.variables:
            return self.variables[name]
        if name in self.globals:
            self._check_by_value(node)
            return of_object(self.globals[name])
        return Known(vars(builtins)[name]) if name in vars(builtins) else UNKNOWN

    def _check_by_value(self, node: ast.Name) -> None:
        origin = imported_names(self._path).get(node.id)
        if origin is None or not self.walker.in_scope(origin[0]):
            return
        module = import_name(origin[0])
        if module is not None and origin[1] in rebound_names(module.__file__ or ""):
            where = f"{origin[0]}.{origin[1]}"
            self.report(27, node, f"{where} changes, this name keeps its value at import")

    def attribute(self, receiver: Value, name: str) -> Value:
        return attribute(self.walker, receiver, name, self.mode)

    # ---- sequences -----------------------------------------------------------------------------

    def _sequence(self, nodes: Sequence[ast.expr]) -> Items:
        first: list[Value] = []
        for node in nodes:
            value = self.value(node)
            if isinstance(node, ast.Starred):
                items = self.items(value)
                first += items.first
                if items.each != UNKNOWN:
                    return Items((), join_all([*first, items.each, *map(self.value, nodes)]))
            else:
                first.append(value if _nesting(value) < _DEEPEST_ITEMS else UNKNOWN)
        return Items(tuple(first))

    def items(self, value: Value) -> Items:
        """What unpacking gives."""
        found: Value = UNKNOWN
        for option in options(value):
            if isinstance(option, Items):
                found = join(found, option)
            elif isinstance(option, Array):
                return Items((), option)
            elif isinstance(option, Host):
                return Items((), option)
            elif isinstance(option, Known):
                found = join(found, Items((), Either(tuple(distinct(option.object)))))
        return found if isinstance(found, Items) else Items()

    def elements(self, value: Value) -> list[Value]:
        """What a loop over it meets, one of each kind."""
        if isinstance(value, Known) and isinstance(value.object, nn.Module):
            return distinct(value.object) or [UNKNOWN]
        return [self.items(value).any()]

    def _comprehension(self, generators: list[ast.comprehension], element: ast.expr) -> Value:
        before = dict(self.variables)
        for generator in generators:
            items = self.value(generator.iter)
            if is_array(items) and not isinstance(items, Items):
                self.report(3, generator.iter, "work is launched for each row of a tensor")
            elif "device" in tags_of(items):
                self.report(3, generator.iter, "work is launched as often as a device value says")
            self.assign(generator.target, join_all(self.elements(items)), None)
            for test in generator.ifs:
                self.condition(test, 5, "the choice depends on a device value")
        result = self.value(element)
        self.variables = before
        return result

    @abstractmethod
    def assign(self, target: ast.expr, value: Value, source: ast.expr | None) -> None:
        """Bind `target` to `value`, which `source` gives."""

    # ---- operators -----------------------------------------------------------------------------

    def _operation(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Mod) and isinstance(left, Host) and is_array(right):
            if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
                self.report(1, node.right, "a tensor is formatted")
                return Host()
        if isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor):
            if is_array(left) and is_array(right):
                return Array(tags_of(left) & tags_of(right) & {"bool"})
        if isinstance(node.op, ast.Add) and isinstance(left, Items) and isinstance(right, Items):
            return Items((*left.first, *right.first), join(left.each, right.each))
        if isinstance(node.op, ast.Mult) and isinstance(left, Items):
            return Items((), left.any())
        if isinstance(node.op, ast.Div | ast.FloorDiv) and "batch" in tags_of(left) & tags_of(
            right
        ):
            # Tokens per request: a width, which the configuration knows.
            return Host((tags_of(left) | tags_of(right)) & {"device"})
        return self.combined(left, right)

    def combined(self, left: Value, right: Value) -> Value:
        """Of arithmetic: a tensor if either is, else a host value."""
        tags = tags_of(left) | tags_of(right)
        arrays = [v for side in (left, right) for v in options(side) if isinstance(v, Array)]
        if arrays:
            on_host = NO_TAGS if any(map(is_array, arrays)) else frozenset({"cpu"})
            return Array(tags & {"sized"} | on_host)
        if isinstance(left, Host) or isinstance(right, Host):
            return Host(tags & {"batch", "device"})
        return UNKNOWN

    def _compare(self, node: ast.Compare) -> Value:
        values = [self.value(part) for part in (node.left, *node.comparators)]
        if any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return Host()
        arrays = [v for v in values if is_array(v) and not isinstance(v, Items)]
        if any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            if arrays:
                self.report(5, node, "`in` compares device values")
            return Host()
        if len(node.ops) > 1 and arrays:
            self.report(5, node, "a chained comparison asks for a device value")
        if arrays:
            return Array(frozenset({"bool"}))
        return Host(frozenset().union(*map(tags_of, values)) & {"device"})

    # ---- subscripts ----------------------------------------------------------------------------

    def _subscript(self, node: ast.Subscript) -> Value:
        receiver = self.value(node.value)
        if isinstance(receiver, Known):
            if isinstance(receiver.object, KernelInterface | Launcher) or _is_triton(receiver):
                return Launch(receiver.object, self._grid(node))
            if isinstance(receiver.object, nn.Module):
                return join_all(self.elements(receiver))
        index = self.value(node.slice)
        return join_all(self._element(node, option, index) for option in options(receiver))

    def _element(self, node: ast.Subscript, receiver: Value, index: Value) -> Value:
        if isinstance(receiver, Array):
            if is_array(receiver):
                if self.is_mask(index):
                    self.report(2, node, "a mask chooses how many elements there are")
                    return Array(frozenset({"sized"}))
                self.check_bounds(node.slice)
            return Array(receiver.tags - {"expanded", "joined"} | tags_of(index) & {"sized"})
        if isinstance(receiver, Items):
            at = node.slice
            if isinstance(at, ast.Constant) and isinstance(at.value, int) and at.value >= 0:
                return receiver.at(at.value)
            if isinstance(at, ast.Slice):
                return self._slice(receiver, at)
            if isinstance(at, ast.UnaryOp) and receiver.first and receiver.each != UNKNOWN:
                return receiver.each
            return receiver.any()
        if isinstance(receiver, Host):
            return Host(receiver.tags & {"device"})
        if isinstance(receiver, Instance):
            return UNKNOWN
        return receiver if isinstance(receiver, Known) and receiver.object is None else UNKNOWN

    def _slice(self, receiver: Items, at: ast.Slice) -> Items:
        if at.step is not None:
            return Items((), receiver.any())
        match at.lower, at.upper:
            case ast.Constant(value=int(begin)), None if begin >= 0:
                return Items(receiver.first[begin:], receiver.each)
            case None, ast.Constant(value=int(end)) if 0 <= end <= len(receiver.first):
                return Items(receiver.first[:end])
            case ast.Constant(value=int(begin)), ast.Constant(value=int(end)) if begin >= 0:
                return Items(tuple(receiver.at(i) for i in range(begin, end)))
        return Items((), receiver.any())

    def check_bounds(self, index: ast.expr) -> None:
        """Slices that end where a device value says."""
        for part in index.elts if isinstance(index, ast.Tuple) else [index]:
            if not isinstance(part, ast.Slice):
                continue
            for bound in (part.lower, part.upper):
                value = self.value(bound)
                device = is_array(value) or "device" in tags_of(value)
                if bound is not None and device:
                    self.report(10, bound, "the slice ends where a device value says")

    def is_mask(self, index: Value) -> bool:
        """Whether an index holds truth values."""
        parts = index.first if isinstance(index, Items) else (index,)
        return any(isinstance(v, Array) and "bool" in v.tags for p in parts for v in options(p))

    def _grid(self, node: ast.Subscript) -> Value:
        grid = self.value(node.slice)
        if "device" in tags_of(grid) or is_array(grid):
            self.report(3, node.slice, "the grid of a launch follows from a device value")
        return grid

    # ---- calls ---------------------------------------------------------------------------------

    def call_local(self, function: Value, args: Sequence[Value]) -> Value:
        """Of a lambda or function inside this one."""
        assert isinstance(function, Local)
        before = self.variables
        names = [a.arg for a in (*function.node.args.posonlyargs, *function.node.args.args)]
        self.variables = {**function.variables, **dict(zip(names, args, strict=False))}
        if isinstance(function.node, ast.Lambda):
            result = self.value(function.node.body)
        else:
            result = self.inner(function.node)
        self.variables = before
        return result

    @abstractmethod
    def inner(self, node: ast.FunctionDef) -> Value:
        """What a function that is defined in this one returns."""


def _nesting(value: Value) -> int:
    if not isinstance(value, Items):
        return 0
    return 1 + max(map(_nesting, (*value.first, value.each)))


def _is_triton(value: Known) -> bool:
    return type(value.object).__module__.startswith("triton.")


def is_mask_name(name: str) -> bool:
    """Tensors of these names hold truth values, as everybody writes it."""
    return name == "mask" or name.endswith(_MASK_NAMES)
