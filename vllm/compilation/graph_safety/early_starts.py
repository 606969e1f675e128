# SPDX-License-Identifier: Apache-2.0
"""Kernels that start while their predecessor still runs: what they touch before they wait for it.

With programmatic dependent launch a kernel begins early and calls `gdc_wait` for the end of its
predecessor. What it reads before must be older, and it may neither write nor end before: its end
stands for the end of all kernels before it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

from triton.runtime.jit import KernelInterface

from vllm.compilation.graph_safety.sources import definition
from vllm.compilation.graph_safety.walker import Body
from vllm.kernels.triton.launcher import Launcher

_WAIT, _START_NEXT = "gdc_wait", "gdc_launch_dependents"
_WRITES = frozenset({"store"})
_READS = frozenset({"load"})
_DEEPEST = 8
_Names = frozenset[str]


@dataclass(frozen=True)
class Misstep:
    """Something that a kernel does before it waits; `function` has the node."""

    function: FunctionType
    node: ast.expr | ast.stmt
    message: str


@dataclass
class EarlyStart:
    """A kernel's part before its wait. `waits`: whether it waits at all; `lets_next_start`: whether
    its successor may begin early; `reads`: its parameters that are read before; `writes`: those
    that are written at all."""

    parameters: tuple[str, ...] = ()
    waits: bool = False
    lets_next_start: bool = False
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    missteps: list[Misstep] = field(default_factory=list)

    @property
    def is_dependent(self) -> bool:
        """Whether the kernel is written to start early."""
        return self.waits or self.lets_next_start


def early_start(kernel: Any) -> EarlyStart | None:
    """Of what a launch names; None without source."""
    function = _function(kernel)
    return None if function is None or definition(function) is None else _early_start(function)


def check_launch(body: Body, kernel: Any, node: ast.Call) -> None:
    """Report what `kernel[grid](...)` does too early (24)."""
    found = early_start(kernel)
    if found is None:
        return
    asked = [k.value for k in node.keywords if k.arg == "launch_pdl"]
    early = any(not isinstance(v, ast.Constant) or v.value for v in asked)
    arguments = dict(zip(found.parameters, node.args, strict=False))
    arguments |= {k.arg: k.value for k in node.keywords if k.arg is not None}
    names = {name: arg.id for name, arg in arguments.items() if isinstance(arg, ast.Name)}
    if early and not found.waits:
        body.report(
            24, node, "the kernel starts before the one before it has ended, and never waits"
        )
    elif early or found.is_dependent:
        for misstep in found.missteps if found.waits else ():
            body.report_in(misstep.function, 24, misstep.node, misstep.message)
        for name in sorted(found.reads & set(names)):
            if names[name] in body.written:
                message = f"the kernel reads {name} before it waits for the one that writes it"
                body.report(24, arguments[name], message)
    else:
        body.written.clear()
    body.written |= {names[name] for name in found.writes & set(names)}


@cache
def _early_start(function: FunctionType) -> EarlyStart:
    node = definition(function)
    assert node is not None
    names = tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args))
    found = EarlyStart(names)
    _Reader(found, function, {name: frozenset({name}) for name in names}, 0).body(node.body, False)
    return found


def _function(thing: Any) -> FunctionType | None:
    """What kernels are compiled of, under launchers, tuners and heuristics."""
    while isinstance(thing, Launcher | KernelInterface):
        thing = thing.kernel if isinstance(thing, Launcher) else vars(thing).get("fn")
    return thing if isinstance(thing, FunctionType) else None


class _Reader:
    """Reads the statements of one function in order. `names`: for each variable the kernel's
    parameters that it follows from."""

    def __init__(
        self, found: EarlyStart, function: FunctionType, names: Mapping[str, _Names], depth: int
    ) -> None:
        self._found, self._function, self._depth = found, function, depth
        self._names = dict(names)

    def body(self, statements: list[ast.stmt], waited: bool) -> tuple[bool, bool]:
        """Whether the kernel has waited after the statements, and whether they end it."""
        for statement in statements:
            waited, ended = self._statement(statement, waited)
            if ended:
                return waited, True
        return waited, False

    def _statement(self, node: ast.stmt, waited: bool) -> tuple[bool, bool]:
        if isinstance(node, ast.If):
            waited = self._calls(node.test, waited)
            branches = [self.body(part, waited) for part in (node.body, node.orelse)]
            # A branch that waits is taken where the kernel starts early, a constant says.
            going_on = [w for w, ended in branches if not ended]
            return any(going_on) if going_on else branches[0][0], not going_on
        if isinstance(node, ast.For | ast.While):
            waited = self._calls(node.iter if isinstance(node, ast.For) else node.test, waited)
            if isinstance(node, ast.For):
                self._assign(node.target, self._follows(node.iter))
            return self.body(node.body, waited)[0], False
        if isinstance(node, ast.Return):
            waited = waited if node.value is None else self._calls(node.value, waited)
            if not waited and not self._depth:
                self._misstep(node, "ends before it has waited for the kernel before it")
            return waited, True
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                waited = self._calls(part, waited)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, self._follows(node.value))
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
            kept = self._follows(node.target)
            self._assign(node.target, kept | self._follows(node.value))
        return waited, False

    def _assign(self, target: ast.expr, names: _Names) -> None:
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                self._names[part.id] = names

    def _follows(self, node: ast.expr) -> _Names:
        """The kernel's parameters that an expression follows from."""
        parts = (p.id for p in ast.walk(node) if isinstance(p, ast.Name))
        return frozenset().union(*(self._names.get(name, frozenset()) for name in parts))

    def _calls(self, node: ast.expr, waited: bool) -> bool:
        """Whether the kernel has waited after an expression; inner calls come first."""
        for child in ast.iter_child_nodes(node):
            for part in [child.value] if isinstance(child, ast.keyword) else [child]:
                if isinstance(part, ast.expr):
                    waited = self._calls(part, waited)
        return self._call(node, waited) if isinstance(node, ast.Call) else waited

    def _call(self, node: ast.Call, waited: bool) -> bool:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name == _WAIT:
            self._found.waits = True
            return True
        if name == _START_NEXT:
            self._found.lets_next_start = True
        if (name in _WRITES or name.startswith("atomic_")) and node.args:
            self._found.writes |= self._follows(node.args[0])
            if not waited:
                self._misstep(node, "writes before it has waited for the kernel before it")
        if not waited and name in _READS and node.args:
            self._found.reads |= self._follows(node.args[0])
        helper = self._helper(node.func)
        return waited if helper is None else self._inside(helper, node, waited)

    def _helper(self, node: ast.expr) -> FunctionType | None:
        thing = self._function.__globals__.get(node.id) if isinstance(node, ast.Name) else None
        return _function(thing) if isinstance(thing, KernelInterface) else None

    def _inside(self, helper: FunctionType, node: ast.Call, waited: bool) -> bool:
        definition_of = definition(helper)
        if definition_of is None or self._depth >= _DEEPEST:
            return waited
        names = [a.arg for a in definition_of.args.args]
        given = dict(zip(names, map(self._follows, node.args), strict=False))
        given |= {k.arg: self._follows(k.value) for k in node.keywords if k.arg is not None}
        reader = _Reader(self._found, helper, given, self._depth + 1)
        return reader.body(definition_of.body, waited)[0]

    def _misstep(self, node: ast.expr | ast.stmt, what: str) -> None:
        self._found.missteps.append(Misstep(self._function, node, f"the kernel {what}"))
