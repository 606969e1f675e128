# SPDX-License-Identifier: Apache-2.0
"""The shell commands of the documentation, read from its text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md")
#: programs of ours, or that a page tells to run; other words in a block without a language are text
_PROGRAMS = ("python", "vllm", "make", "curl", "lm_eval", "guidellm", "pip", "export")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:python|vllm) [^`\n]+)`")
_ASSIGNMENT = re.compile(r"^[A-Z_]+=\S*$")


@dataclass(frozen=True)
class Command:
    """One command of one page; `words` without the assignments before it."""

    page: str
    text: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def documented_commands() -> list[Command]:
    """Every command once per page, in the order of the text."""
    found = [command for page in PAGES for command in commands_of(page.name, page.read_text())]
    return list(dict.fromkeys(found))


def commands_of(page: str, text: str) -> Iterator[Command]:
    """The commands in fenced blocks of shell and, for our programs, in the running text."""
    for language, body in _BLOCK.findall(text):
        if language in ("", "bash", "sh", "console"):
            for line in _logical_lines(body):
                if language == "console" and not line.startswith("$ "):
                    continue
                yield from _command(page, line.removeprefix("$ "))
    for line in _INLINE.findall(_BLOCK.sub("", text)):
        yield from _command(page, line)


def _command(page: str, line: str) -> Iterator[Command]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return  # running text
    while words and _ASSIGNMENT.match(words[0]):
        del words[0]
    if words and words[0] in _PROGRAMS:
        yield Command(page, " ".join(line.split()), tuple(words))


def _logical_lines(body: str) -> Iterator[str]:
    """Lines joined where a quotation or a backslash goes on."""
    held = ""
    for line in body.splitlines():
        held += line
        if held.endswith("\\"):
            held = held[:-1]
            continue
        try:
            shlex.split(held, comments=True)
        except ValueError:
            held += "\n"
            continue
        yield held
        held = ""
    if held:
        yield held.split("\n")[0]


def python_blocks(page: Path) -> list[str]:
    """The Python code of a page, block by block."""
    return [body for language, body in _BLOCK.findall(page.read_text()) if language == "python"]
