# SPDX-License-Identifier: Apache-2.0
"""Modules import in one direction: no cycles, and the lower packages know nothing above them.

The graph is read from the source, so that imports inside functions and for type checking count too.
Two kinds do not: of a package's `__init__` by its own modules, and of what a registry names in a
string and loads when it is asked for (models, connectors, executors, parsers).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Graph = dict[str, set[str]]

_BASICS = ("vllm.decisions", "vllm.envs", "vllm.exceptions", "vllm.logger", "vllm.platforms")
#: package -> all that it may import
LOWER_PACKAGES = {
    "vllm.utils": _BASICS,
    "vllm.config": (*_BASICS, "vllm.transformers_utils", "vllm.utils"),
    "vllm.transformers_utils": (*_BASICS, "vllm.utils"),
}


def imports_of(source: str, module: str, is_package: bool, known: set[str]) -> set[str]:
    """The modules among `known` that `source` imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base]).rstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found.add(name if name in known else base)
    return (found & known) - {module}


def import_graph(package: Path) -> Graph:
    """Module -> modules of the same package that it imports."""
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    known = set(files)
    return {
        module: imports_of(path.read_text(encoding="utf-8"), module, path.stem == "__init__", known)
        for module, path in files.items()
    }


def cycles(graph: Graph) -> list[set[str]]:
    """The strongly connected components with more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in graph[module]:
            if imported not in index:
                visit(imported)
            if imported in stack:
                low[module] = min(low[module], low[imported])
        if low[module] == index[module]:
            first = stack.index(module)
            component = set(stack[first:])
            del stack[first:]
            if len(component) > 1:
                found.append(component)

    for module in graph:
        if module not in index:
            visit(module)
    return found


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph(ROOT / "vllm")


def test_no_cycles(graph: Graph) -> None:
    report = [
        "\n".join(f"  {m} -> {', '.join(sorted(graph[m] & found))}" for m in sorted(found))
        for found in cycles(graph)
    ]
    assert not report, "modules that import each other:\n" + "\n\n".join(report)


@pytest.mark.parametrize("package", LOWER_PACKAGES)
def test_lower_packages_know_nothing_above_them(graph: Graph, package: str) -> None:
    within = (package, *LOWER_PACKAGES[package])
    upward = [
        f"{module} imports {imported}"
        for module, all_imported in graph.items()
        if _is_in(module, (package,))
        for imported in sorted(all_imported)
        if not _is_in(imported, within)
    ]
    assert not upward, "\n".join(upward)


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_every_import_counts(tmp_path: Path) -> None:
    """In functions, for type checking, relative ones, and through a package."""
    package = tmp_path / "p"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def f():\n    from p import b\n")
    (package / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.sub import c\n"
    )
    (package / "sub" / "__init__.py").write_text("from . import c\n")
    (package / "sub" / "c.py").write_text("from ..a import f\nimport os\n")
    graph = import_graph(package)
    assert graph["p.a"] == {"p.b"} and graph["p.b"] == {"p.sub.c"}
    assert graph["p.sub"] == {"p.sub.c"} and graph["p.sub.c"] == {"p.a"}
    assert cycles(graph) == [{"p.a", "p.b", "p.sub.c"}]
    (package / "sub" / "c.py").write_text("")
    assert cycles(import_graph(package)) == []
