# SPDX-License-Identifier: Apache-2.0
"""A call written as Python, `name(key=literal, ...)`, while its text is still arriving."""

import ast
import json
import re
from collections.abc import Container
from typing import Any

from vllm.tool_parsers.stepwise import CallState

_NAME_START = re.compile(r"[A-Za-z_]")
_NAME = re.compile(r"[\w.-]", re.ASCII)
_ARGUMENT = re.compile(r"\s*([A-Za-z_][\w-]*)\s*=(.*)", re.ASCII | re.DOTALL)
#: longer "names" are text
_MAX_NAME = 256
#: open brackets of a call; Python's own parser takes 200
_MAX_DEPTH = 100
_CLOSING = {"(": ")", "[": "]", "{": "}"}
#: constants as JSON spells them, which models write as often as Python's
_JSON_NAMES = {"null": None, "true": True, "false": False}
#: what may follow a backslash in a Python string; any other backslash stands for itself
_ESCAPES = frozenset("\\'\"abfnrtvxuUN01234567\n\r")
_LINE_BREAKS = {"\n": "\\n", "\r": "\\r"}


def read_literal(text: str) -> Any:
    """The value of a Python literal that JSON can hold; ValueError for anything else."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no literal: {error}") from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if (
            not isinstance(value, bool)
        ):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError(f"{type(node).__name__} is no literal that JSON can hold")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("the keys of a JSON object are strings")


class PythonCallReader:
    """Reads one call; `raw` is what of it was read, `name` and `arguments` are its meaning.

    Every argument is `key=literal`. A call is refused before the first character that shows it to
    be none: a name outside of `names` (if these are given), an argument without key, twice the
    same key, a value that is no literal. Strings may hold line breaks as they are, and backslashes
    that begin no escape.
    """

    def __init__(self, names: Container[str] | None = None) -> None:
        self.state = CallState.OPEN
        self.raw = ""
        self.name = ""
        self._names = names
        self._arguments: dict[str, Any] = {}
        #: the closing brackets that are due, that of the call first
        self._brackets: list[str] = []
        #: the argument being read, as Python's parser takes it
        self._source: list[str] = []
        self._string: _StringScanner | None = None

    @property
    def arguments(self) -> str:
        """JSON of the arguments of a call that has ended."""
        return json.dumps(self._arguments, ensure_ascii=False)

    def feed(self, text: str) -> int:
        """Read more; returns how many characters of `text` belong to the call."""
        at = 0
        while at < len(text) and self.state is CallState.OPEN:
            char = text[at]
            if not self._brackets:
                self._read_name(char)
            elif self._string is None or not self._string.feed(char, self._source):
                self._string = None
                self._read_source(char)
            at += self.state is not CallState.REFUSED
        self.raw += text[:at]
        return at

    def _read_name(self, char: str) -> None:
        if char == "(" and self.name and (self._names is None or self.name in self._names):
            self._brackets.append(")")
        elif len(self.name) < _MAX_NAME and (_NAME if self.name else _NAME_START).match(char):
            self.name += char
        else:
            self.state = CallState.REFUSED

    def _read_source(self, char: str) -> None:
        """A character outside of strings."""
        if char in "'\"":
            self._string = _StringScanner(char, raw=self._source[-1:] in (["r"], ["R"]))
        elif char in _CLOSING:
            self._brackets.append(_CLOSING[char])
            self._check(len(self._brackets) <= _MAX_DEPTH)
        elif char in ")]}":
            self._check(self._brackets.pop() == char)
            if not self._brackets:
                self._end_argument(last=True)
                return
        elif char == "," and len(self._brackets) == 1:
            self._end_argument(last=False)
            return
        elif char == "<":  # in no literal; it begins the tag behind a call that is not complete
            self._check(False)
        self._source.append(char)

    def _end_argument(self, last: bool) -> None:
        source = "".join(self._source)
        self._source = []
        if last and not source.strip():
            self._end()
            return
        written = _ARGUMENT.fullmatch(source)
        if written is None or written[1] in self._arguments:
            self.state = CallState.REFUSED
            return
        try:
            value = read_literal(written[2])
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            self.state = CallState.REFUSED
            return
        self._arguments[written[1]] = value
        if last:
            self._end()

    def _end(self) -> None:
        if self.state is CallState.OPEN:
            self.state = CallState.ENDED

    def _check(self, good: bool) -> None:
        if not good:
            self.state = CallState.REFUSED


class _StringScanner:
    """Follows one string literal from behind its first quote to its end."""

    def __init__(self, quote: str, raw: bool) -> None:
        self._quote = quote
        self._raw = raw
        #: None while the literal may be `''` or the beginning of `'''`
        self._triple: bool | None = None
        self._length = 0
        self._run = 0
        self._escaped = False
        self._closed = False

    def feed(self, char: str, source: list[str]) -> bool:
        """Whether `char` belongs to the string, and if so, what `source` gets for it."""
        if self._closed and self._triple is None and char == self._quote:
            self._triple, self._closed, self._run = True, False, 0
            source.append(char)
            return True
        if self._closed:
            return False
        self._length += 1
        if self._escaped:
            self._escaped = False
            source.append(char if self._raw or char in _ESCAPES else "\\" + char)
        elif char == "\\":
            self._escaped, self._run = True, 0
            source.append(char)
        elif char == self._quote:
            self._run += 1
            self._closed = self._run == 3 if self._triple else True
            if self._length > 1 and self._triple is None:
                self._triple = False
            source.append(char)
        else:
            self._run = 0
            source.append(char if self._raw else _LINE_BREAKS.get(char, char))
        return True
