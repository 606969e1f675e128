# SPDX-License-Identifier: Apache-2.0
"""The syntax trees of functions and classes of this process."""

from __future__ import annotations

import ast
import linecache
from functools import cache
from types import CodeType, FunctionType, ModuleType


@cache
def parsed(path: str) -> ast.Module | None:
    """The tree of a file; None where there is none to read."""
    text = "".join(linecache.getlines(path))
    return ast.parse(text) if text else None


def parsed_module(module: ModuleType | None) -> ast.Module | None:
    """None where a module has no source."""
    path = None if module is None else module.__file__ if "__file__" in vars(module) else None
    return None if path is None or not path.endswith(".py") else parsed(path)


@cache
def _definitions(path: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """By name and first line, a decorator's if there are any."""
    tree = parsed(path)
    found = {}
    for node in ast.walk(tree) if tree is not None else []:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name, first] = node
    return found


def definition(function: FunctionType) -> ast.FunctionDef | None:
    """The node of a function; None for lambdas and what has no source."""
    return definition_of_code(function.__code__)


def definition_of_code(code: CodeType) -> ast.FunctionDef | None:
    """The same of a function's code."""
    return _definitions(code.co_filename).get((code.co_name, code.co_firstlineno))


@cache
def rebound_names(path: str) -> frozenset[str]:
    """Names that functions of a file declare `global`: the module's mutable state."""
    tree = parsed(path)
    nodes = ast.walk(tree) if tree is not None else iter(())
    return frozenset(n for node in nodes if isinstance(node, ast.Global) for n in node.names)


@cache
def imported_names(path: str) -> dict[str, tuple[str, str]]:
    """Names a module takes from others at its top: name -> (module, name there)."""
    tree = parsed(path)
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in (tree.body if tree is not None else [])
        if isinstance(node, ast.ImportFrom) and not node.level
        for alias in node.names
    }
