# SPDX-License-Identifier: Apache-2.0
"""The pass: walks functions and all they call, each once per kind of arguments."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType

from vllm.compilation.graph_break import is_graph_break
from vllm.compilation.graph_safety.annotations import annotated
from vllm.compilation.graph_safety.expressions import is_mask_name
from vllm.compilation.graph_safety.frame import Frame
from vllm.compilation.graph_safety.members import annotation_of
from vllm.compilation.graph_safety.sources import definition
from vllm.compilation.graph_safety.values import (
    UNKNOWN,
    Array,
    Capturing,
    Host,
    Instance,
    Items,
    Value,
    is_array,
    of_object,
)
from vllm.compilation.graph_safety.walker import Arguments, Finding, Mode, Walker

#: calls inside calls; deeper ones are taken by their annotations, and named in the report
_DEEPEST = 50


class Scan(Walker):
    """`packages`: names of the packages and modules whose functions are walked."""

    def __init__(
        self, packages: tuple[str, ...], progress: Callable[[str], None] = lambda name: None
    ) -> None:
        self._packages = packages
        self._progress = progress
        self._results: dict[object, Value] = {}
        self._attributes: dict[type, dict[str, Value]] = {}
        self._initial: dict[type, set[str]] = {}
        self._depth = 0
        #: what was found, and where it runs
        self.findings: dict[Finding, Mode] = {}
        self.functions: set[str] = set()
        #: functions of which some calls are not walked, for they are too deep
        self.cut: set[str] = set()

    def in_scope(self, module: str) -> bool:
        return any(module == p or module.startswith(p + ".") for p in self._packages)

    def run(
        self, function: FunctionType, receiver: Value | None, args: Arguments, mode: Mode
    ) -> Value:
        is_break = is_graph_break(function)
        plain = inspect.unwrap(function)
        assert isinstance(plain, FunctionType)
        if is_break and mode is Mode.CAPTURED:
            mode = Mode.BREAK
        node = definition(plain)
        declared = annotated(
            plain.__annotations__.get("return"), plain.__globals__, plain.__module__
        )
        key = (plain.__code__, receiver, args, mode)
        if key in self._results:
            return self._results[key]
        if node is None:
            return declared
        if self._depth >= _DEEPEST:
            self.cut.add(f"{plain.__module__}.{plain.__qualname__}")
            return declared
        self._results[key] = declared
        variables = self._bound(plain, node, receiver, args)
        frame = Frame(self, plain, variables, mode, is_break, self.findings)
        if mode is not Mode.BUILD:
            name = f"{plain.__module__}.{plain.__qualname__}"
            self.functions.add(name)
            self._progress(name)
        self._depth += 1
        frame.walk(node.body)
        self._depth -= 1
        truth = plain.__annotations__.get("return") in (bool, "bool")
        result = _result_of(frame.returned, declared, truth)
        self._results[key] = result
        if plain.__name__ == "__init__":
            # What a new object is made of; `made` knows its class.
            result = Instance(object, tuple(frame.given.items()))
            self._results[key] = result
        return result

    def _bound(
        self, function: FunctionType, node: ast.FunctionDef, receiver: Value | None, args: Arguments
    ) -> dict[str, Value]:
        """The parameters' values: what is passed, else what is annotated."""
        spec = node.args
        given = [] if receiver is None else [receiver]
        given += args.positional
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        passed = dict(zip(names, given, strict=False))
        if args.rest is not None:
            passed |= {name: args.rest for name in names[len(given) :]}
        passed |= dict(args.named)
        variables = self._closure(function)
        guesses = function.__name__ == "forward"
        for parameter in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
            name = parameter.arg
            value = passed.get(name, UNKNOWN)
            if value == UNKNOWN or isinstance(value, Host):
                declared = annotated(
                    parameter.annotation, function.__globals__, function.__module__
                )
                if guesses and parameter.annotation is None and name != "self":
                    declared = Array()
                untold = value == UNKNOWN or (name not in passed and declared != UNKNOWN)
                value = declared if untold else value
            if isinstance(value, Array) and is_mask_name(name):
                value = Array(value.tags | {"bool"})
            variables[name] = value
        if spec.vararg is not None:
            more = tuple(given[len(names) :])
            each = annotated(spec.vararg.annotation, function.__globals__, function.__module__)
            each = each if args.rest is None else args.rest
            variables[spec.vararg.arg] = Items(
                more, UNKNOWN if more and args.rest is None else each
            )
        if spec.kwarg is not None:
            variables[spec.kwarg.arg] = Items()
        return variables

    @staticmethod
    def _closure(function: FunctionType) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                found[name] = of_object(cell.cell_contents)
            except ValueError:  # a cell that is not filled yet
                continue
        return found

    def made(self, cls: type, args: Arguments, mode: Mode) -> Value:
        fields: dict[str, Value] = {}
        if dataclasses.is_dataclass(cls):
            names = [f.name for f in dataclasses.fields(cls) if f.init]
            passed = dict(zip(names, args.positional, strict=False)) | dict(args.named)
            fields = {name: _field(cls, name, value) for name, value in passed.items()}
        made = Instance(cls, tuple(sorted(fields.items())), exact=True)
        for name in ("__init__", "__post_init__"):
            method = inspect.getattr_static(cls, name, None)
            if not isinstance(method, FunctionType) or not self.in_scope(method.__module__):
                continue
            if name == "__post_init__":
                self.run(method, made, Arguments(), mode)
            elif definition(method) is not None:
                given = self.run(method, made, args, mode)
                if isinstance(given, Instance):
                    made = Instance(cls, given.fields, exact=True)
        return made

    def has_initially(self, cls: type, name: str) -> bool:
        self.attributes(cls)
        return name in self._initial[cls] or annotation_of(cls, name) != UNKNOWN

    def attributes(self, cls: type) -> Mapping[str, Value]:
        if cls in self._attributes:
            return self._attributes[cls]
        found: dict[str, Value] = {}
        self._attributes[cls] = found
        self._initial[cls] = set()
        for base in reversed(cls.__mro__):
            methods = [m for m in vars(base).values() if isinstance(m, FunctionType)]
            # What `__init__` gives comes first, and what the others add.
            methods.sort(key=lambda method: method.__name__ != "__init__")
            for method in methods if self.in_scope(base.__module__) else []:
                node = definition(inspect.unwrap(method))
                constructs = method.__name__ == "__init__"
                if node is None or not (constructs or _own_names(node) - set(found)):
                    continue
                variables = self._bound(method, node, Instance(cls), Arguments())
                frame = Frame(self, method, variables, Mode.BUILD, False, {})
                frame.walk(node.body)
                for name, value in frame.given.items():
                    if found.get(name, UNKNOWN) in (UNKNOWN, Host()):
                        found[name] = value
                    if constructs:
                        self._initial[cls].add(name)
        return found


def _result_of(returned: Value | None, declared: Value, truth: bool) -> Value:
    """Of a function: what it returns, where that says more than its annotation. One that is not
    declared to return a `truth` value may return None at its end besides."""
    if returned is None:
        return declared
    if isinstance(returned, Capturing):
        if truth:
            return returned
        returned = Host()
    if isinstance(returned, Host):
        return returned if declared in (UNKNOWN, Host()) else declared
    return declared if returned == UNKNOWN else returned


def _field(cls: type, name: str, value: Value) -> Value:
    """What a dataclass's field holds: what it is given, else what it is declared."""
    declared = annotation_of(cls, name)
    absent = isinstance(value, Host) and not value.tags and is_array(declared)
    return declared if value == UNKNOWN or absent else value


@cache
def _own_names(node: ast.FunctionDef) -> frozenset[str]:
    """What a method assigns to attributes of `self`."""
    return frozenset(
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute)
        and isinstance(found.ctx, ast.Store)
        and isinstance(found.value, ast.Name)
        and found.value.id == "self"
    )
