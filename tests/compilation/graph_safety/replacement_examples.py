# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/graph-safety.md, taken from the samples that the checks run on.

`python -m tests.compilation.graph_safety.replacement_examples` prints them.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from vllm.compilation.graph_safety.hazards import HAZARDS

SAMPLES = Path(__file__).parent / "samples"
#: what source tells, and what replays tell
FILES = (SAMPLES / "replacements.py", SAMPLES / "replacements_replayed.py")
_MARK = re.compile(r"  # (\d+)$")


@dataclass(frozen=True)
class Pair:
    """An item with the classes `<name>Before` and `<name>After` of a file; `line`: the number's."""

    hazard: int
    name: str
    path: Path
    line: int
    before: str
    after: str

    @property
    def markdown(self) -> str:
        before, after = (
            f"```python\n# {name}\n{code}\n```"
            for name, code in (("before", self.before), ("after", self.after))
        )
        return f"**{self.hazard}. {HAZARDS[self.hazard].title}**\n\n{before}\n\n{after}"


def pairs() -> list[Pair]:
    """Of both files, by number."""
    found = [pair for path in FILES for pair in _of_file(path)]
    return sorted(found, key=lambda pair: pair.hazard)


def _of_file(path: Path) -> list[Pair]:
    source = path.read_text()
    classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    found = []
    for name, node in classes.items():
        if not name.endswith("Before"):
            continue
        stem = name.removesuffix("Before")
        lines = source.splitlines()
        ((line, hazard),) = (
            (number, int(mark[1]))
            for number in range(node.lineno, (node.end_lineno or 0) + 1)
            if (mark := _MARK.search(lines[number - 1]))
        )
        before, after = (_code(lines, one) for one in (node, classes[f"{stem}After"]))
        found.append(Pair(hazard, stem, path, line, before, after))
    return found


def _code(lines: list[str], node: ast.ClassDef) -> str:
    """What runs in a step: the body of the only method, or all methods but the constructor."""
    methods = [
        part for part in node.body if isinstance(part, ast.FunctionDef) and part.name != "__init__"
    ]
    if len(methods) == 1:
        (method,) = methods
        first = min(_first_line(lines, statement) for statement in method.body)
        return _dedented(lines[first - 1 : method.end_lineno])
    parts = [
        _dedented(lines[min([m.lineno, *(d.lineno for d in m.decorator_list)]) - 1 : m.end_lineno])
        for m in methods
    ]
    return "\n\n\n".join(parts)


def _first_line(lines: list[str], statement: ast.stmt) -> int:
    """Of a statement with the comments right above it."""
    number = statement.lineno
    while lines[number - 2].lstrip().startswith("#"):
        number -= 1
    return number


def _dedented(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(_MARK.sub("", line) for line in lines))


def markdown() -> str:
    """All examples, as the page has them."""
    return "\n\n".join(pair.markdown for pair in pairs())


if __name__ == "__main__":
    print(markdown())
