# SPDX-License-Identifier: Apache-2.0
"""From type annotations to values."""

from __future__ import annotations

import ast
import importlib
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.compilation.graph_safety.sources import parsed_module
from vllm.compilation.graph_safety.values import (
    UNKNOWN,
    Array,
    Host,
    Instance,
    Items,
    Value,
    join_all,
)

_HOST = (
    bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic, torch.dtype,
    torch.device, torch.Size,
)  # fmt: skip


@cache
def type_checking_names(module_name: str) -> dict[str, Any]:
    """What a module imports `if TYPE_CHECKING`; what cannot be imported is left out."""
    tree = parsed_module(sys.modules.get(module_name))
    found: dict[str, Any] = {}
    for node in tree.body if tree is not None else []:
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        for statement in node.body:
            if isinstance(statement, ast.ImportFrom) and not statement.level:
                for alias in statement.names:
                    thing = import_name(statement.module or "", alias.name)
                    found[alias.asname or alias.name] = thing
    return {name: thing for name, thing in found.items() if thing is not None}


def import_name(module: str, name: str | None = None) -> Any:
    """`module.name`, a module or what is in it; None if there is no such thing."""
    try:
        found = importlib.import_module(module)
        if name is None:
            return found
        if name in vars(found) or "__getattr__" in vars(found):
            return getattr(found, name)
        return importlib.import_module(f"{module}.{name}")
    except (ImportError, AttributeError):
        return None


def annotated(annotation: Any, names: dict[str, Any], module: str) -> Value:
    """The value of an annotation, given as an object, a string or an expression."""
    if isinstance(annotation, ast.expr):
        annotation = ast.unparse(annotation)
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        scope = {**vars(typing), **names, **type_checking_names(module)}
        try:
            annotation = eval(annotation, scope)
        except Exception:  # a name that exists for type checkers alone
            return UNKNOWN
        if isinstance(annotation, str):
            return annotated(annotation, names, module)
    return of_type(annotation)


def of_type(kind: Any) -> Value:
    """The value of a type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return join_all(of_type(arg) for arg in args)
    if origin in (typing.Annotated, typing.ClassVar, typing.Final):
        return of_type(args[0])
    if origin is typing.Literal:
        return Host()
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return Items((), of_type(args[0]))
        return Items(tuple(of_type(arg) for arg in args))
    if isinstance(origin, type):
        if issubclass(origin, Mapping) and len(args) == 2:
            return Items((), of_type(args[1]))
        if issubclass(origin, Collection | Iterable) and args and origin.__module__ in _STANDARD:
            return Items((), of_type(args[0]))
        kind = origin
    if not isinstance(kind, type) or kind in (object, typing.Any):  # a class since Python 3.11
        return UNKNOWN
    if issubclass(kind, Tensor):
        return Array()
    return Host() if issubclass(kind, _HOST) else Instance(kind)


_STANDARD = ("builtins", "collections", "collections.abc", "typing")
