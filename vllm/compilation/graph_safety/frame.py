# SPDX-License-Identifier: Apache-2.0
"""Walks the statements of one function."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import torch
from torch import nn

from vllm.compilation.graph_safety.annotations import annotated, import_name
from vllm.compilation.graph_safety.expressions import Expressions
from vllm.compilation.graph_safety.hazards import hazard_of_branch
from vllm.compilation.graph_safety.sources import definition
from vllm.compilation.graph_safety.values import (
    UNKNOWN,
    Capturing,
    Host,
    Instance,
    Items,
    Known,
    Local,
    Value,
    is_array,
    join,
    of_object,
    tags_of,
)
from vllm.compilation.graph_safety.walker import Mode

_WAITS = frozenset({"wait_stream", "wait_event"})
#: what is said of a branch, by its hazard
_OF_BRANCHES = {
    5: "the branch depends on a device value",
    8: "the function is left where a device value says so",
    11: "the loop ends where a device value says so",
}


class Frame(Expressions):
    """A function's body with what its names are. `returned`: all it returns, None so far."""

    returned: Value | None = None

    def walk(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def inner(self, node: ast.FunctionDef) -> Value:
        before, self.returned = self.returned, None
        self.walk(node.body)
        result, self.returned = self.returned, before
        if isinstance(result, Capturing):
            return Host()
        return UNKNOWN if result is None else result

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr():
                self.value(node.value)
            case ast.Assign():
                value = self.value(node.value)
                for target in node.targets:
                    self.assign(target, value, node.value)
            case ast.AnnAssign():
                value = self.value(node.value) if node.value is not None else UNKNOWN
                declared = annotated(node.annotation, self.globals, self.module)
                known = value if value != UNKNOWN and not isinstance(value, Host) else declared
                self.assign(node.target, known if known != UNKNOWN else value, node.value)
            case ast.AugAssign():
                self._augmented(node)
            case ast.Return():
                self._return(node)
            case ast.If():
                self._branch(node)
            case ast.For():
                self._for(node)
            case ast.While():
                test = self.condition(
                    node.test, 11, "the loop goes on while a device value says so"
                )
                with self.where(test, True):
                    self._loop(node.body)
                self.walk(node.orelse)
            case ast.With():
                for item in node.items:
                    self._check_stream(node, item.context_expr)
                    opened = self.value(item.context_expr)
                    if item.optional_vars is not None:
                        inside = opened.any() if isinstance(opened, Items) else opened
                        self.assign(item.optional_vars, inside, None)
                self.walk(node.body)
            case ast.Try():
                for part in (node.body, *(h.body for h in node.handlers)):
                    self.walk(part)
                self.walk(node.orelse)
                self.walk(node.finalbody)
            case ast.Assert():
                self.condition(node.test, 5, "an assertion reads a device value")
            case ast.Raise():
                self.value(node.exc)
            case ast.FunctionDef():
                self.variables[node.name] = Local(node, self.variables)
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.Match():
                self.value(node.subject)
                for case in node.cases:
                    self.walk(case.body)

    def _check_stream(self, block: ast.With, opened: ast.expr) -> None:
        """Whether work on a stream of its own is ordered (24)."""
        if not isinstance(opened, ast.Call) or not opened.args:
            return
        called = self.value(opened.func)
        whole = definition(inspect.unwrap(self.function))
        if not isinstance(called, Known) or called.object is not torch.cuda.stream:
            return
        missing = None if whole is None else unordered(whole, block, opened.args[0])
        if missing is not None:
            self.report(24, opened, missing)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                found = import_name(alias.name if alias.asname else alias.name.split(".")[0])
            else:
                found = import_name(node.module or "", alias.name)
            name = alias.asname or alias.name.split(".")[0]
            self.variables[name] = UNKNOWN if found is None else of_object(found)

    def _return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        value = self.told(node.value)
        if self.is_break and is_array(value):
            self.report(6, node, "an eager break returns a tensor that the next graph never reads")
        self.returned = value if self.returned is None else join(self.returned, value)

    def _branch(self, node: ast.If) -> None:
        hazard = hazard_of_branch(node)
        test = self.condition(node.test, hazard, _OF_BRANCHES[hazard])
        if isinstance(test, Known) and isinstance(test.object, bool):
            self.walk(node.body if test.object else node.orelse)
            return
        before = dict(self.variables)
        with self.where(test, True):
            self.walk(node.body)
        taken, self.variables = self.variables, before
        with self.where(test, False):
            self.walk(node.orelse)
        self._merge(taken)

    def _merge(self, other: dict[str, Value]) -> None:
        for name, value in other.items():
            mine = self.variables.get(name, UNKNOWN)
            self.variables[name] = join(mine, value)

    def _for(self, node: ast.For) -> None:
        items = self.value(node.iter)
        if is_array(items) and not isinstance(items, Items):
            self.report(3, node.iter, "the loop launches its body for each row of a tensor")
        elif "device" in tags_of(items):
            self.report(3, node.iter, "the loop runs as often as a device value says")
        for element in self.elements(items):
            before = dict(self.variables)
            self.assign(node.target, element, None)
            self._loop(node.body)
            self._merge(before)
        self.walk(node.orelse)

    def _loop(self, body: list[ast.stmt]) -> None:
        # Twice: what an iteration leaves behind is what the next one meets.
        for _ in range(2):
            before = dict(self.variables)
            self.walk(body)
            self._merge(before)

    # ---- targets -------------------------------------------------------------------------------

    def assign(self, target: ast.expr, value: Value, source: ast.expr | None) -> None:
        match target:
            case ast.Name():
                self.variables[target.id] = value
            case ast.Tuple() | ast.List():
                self._unpack(target.elts, value)
            case ast.Starred():
                self.assign(target.value, Items((), value), None)
            case ast.Attribute():
                self._assign_attribute(target, value)
                if isinstance(value, Host) and _reads(source, target):
                    self._change(target, value)
            case ast.Subscript():
                self._assign_element(target, value, source)

    def _unpack(self, targets: list[ast.expr], value: Value) -> None:
        items = self.items(value)
        for index, target in enumerate(targets):
            self.assign(target, items.at(index), None)

    def _assign_attribute(self, target: ast.Attribute, value: Value) -> None:
        receiver = self.value(target.value)
        on_self = isinstance(target.value, ast.Name) and target.value.id == "self"
        if on_self:
            self.given[target.attr] = value
        constructs = self.name in ("__init__", "__post_init__")
        if not on_self or constructs or self.mode not in (Mode.CAPTURED, Mode.BREAK):
            return
        before: Value = UNKNOWN
        fresh = isinstance(receiver, Instance) and not self.walker.has_initially(
            receiver.cls, target.attr
        )
        if not fresh:
            before = self.attribute(receiver, target.attr)
        if is_array(value) and not isinstance(value, Items):
            if "joined" in tags_of(value):
                self.report(9, target, f"self.{target.attr} grows by being replaced")
            elif is_array(before):
                self.report(17, target, f"self.{target.attr} is replaced by another tensor")
            else:
                self.report(26, target, f"self.{target.attr} keeps a tensor for the next step")
        elif isinstance(value, Host) and is_array(before) and not isinstance(before, Items):
            self.report(17, target, f"self.{target.attr}, a tensor, is replaced by something else")

    def _assign_element(self, target: ast.Subscript, value: Value, source: ast.expr | None) -> None:
        receiver = self.value(target.value)
        if not is_array(receiver):
            self.value(target.slice)
            if isinstance(value, Host) and _reads(source, target):
                self._change(target, value)
            return
        index = self.value(target.slice)
        if self.is_mask(index):
            if not isinstance(value, Host):
                self.report(2, target, "a mask chooses how many elements are written")
            return
        self.check_bounds(target.slice)
        constant = _is_whole(target.slice) and isinstance(source, ast.Constant)
        if isinstance(value, Host) and not constant:
            self.report(4, target, "a Python number becomes part of the graph")

    def _augmented(self, node: ast.AugAssign) -> None:
        value = self.value(node.value)
        target = node.target
        if isinstance(target, ast.Name):
            before = self.variables.get(target.id, UNKNOWN)
            self.variables[target.id] = self.combined(before, value)
            return
        if isinstance(target, ast.Subscript) and is_array(self.value(target.value)):
            self._augment_element(target, value, node.value)
        else:
            self._change(target, value)

    def _augment_element(self, target: ast.Subscript, value: Value, source: ast.expr) -> None:
        """Of a tensor: a constant is added in every replay, too."""
        if self.is_mask(self.value(target.slice)):
            self.report(2, target, "a mask chooses how many elements are written")
            return
        self.check_bounds(target.slice)
        frozen = isinstance(value, Host) and not isinstance(source, ast.Constant)
        if frozen and not _is_whole(target.slice):
            self.report(4, target, "a Python number becomes part of the graph")

    def _change(self, target: ast.Attribute | ast.Subscript, value: Value) -> None:
        """What is kept under `target` follows from what was there, which only the host knows; a
        tensor there is changed in place, by the graph."""
        before = self.value(target)
        if self.mode is not Mode.CAPTURED or before == UNKNOWN or is_array(before):
            return
        if self.name in ("__init__", "__post_init__") or not self._lives_on(target.value):
            return
        name = ast.unparse(target)
        if is_array(value.any() if isinstance(value, Items) else value):
            self.report(26, target, f"{name} keeps a tensor for the next step")
        elif "device" not in tags_of(value):  # the read is found where it is
            self.report(7, target, f"a replay neither changes {name} nor takes the new value")

    def _lives_on(self, owner: ast.expr) -> bool:
        """Whether an object is there after the step: the model's or a module's."""
        if isinstance(owner, ast.Name) and owner.id not in self.variables:
            return True
        value = self.value(owner)
        if isinstance(value, Known):
            return True
        if isinstance(owner, ast.Attribute | ast.Subscript):
            return self._lives_on(owner.value)
        if not isinstance(value, Instance) or ast.unparse(owner) != "self":
            return False
        # What a step makes is known exactly, and it makes no modules.
        return issubclass(value.cls, nn.Module) or not value.exact


def _reads(source: ast.expr | None, target: ast.expr) -> bool:
    """Whether an expression reads what is assigned to."""
    if source is None:
        return False
    name = ast.unparse(target)
    return any(ast.unparse(node) == name for node in ast.walk(source) if isinstance(node, ast.expr))


def _is_whole(index: ast.expr) -> bool:
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return all(isinstance(part, ast.Slice) or _is_ellipsis(part) for part in parts)


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


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
