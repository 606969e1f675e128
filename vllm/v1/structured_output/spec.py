# SPDX-License-Identifier: Apache-2.0
"""A constraint in one normal form: what is compiled, and the key it is cached by."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    import xgrammar

#: of one constraint; longer ones would keep a compiler thread busy for minutes
MAX_SOURCE_CHARS = 1 << 20
_CONTROL = bytes(set(range(32)) - set(b"\n\r"))


class GrammarKind(enum.Enum):
    """The language `GrammarSpec.source` is written in."""

    JSON_SCHEMA = "json"
    REGEX = "regex"
    EBNF = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """`any_whitespace` concerns JSON alone: free whitespace, or one space after `:` and `,`."""

    kind: GrammarKind
    source: str
    any_whitespace: bool = True

    def __post_init__(self) -> None:
        if len(self.source) > MAX_SOURCE_CHARS:
            raise ValueError(
                f"the constraint has {len(self.source)} characters; at most {MAX_SOURCE_CHARS} "
                "are compiled"
            )
        if not _is_encodable(self.source):
            raise ValueError("the constraint holds a lone surrogate, which no text can contain")

    @classmethod
    def from_params(
        cls, params: StructuredOutputsParams, any_whitespace: bool = True
    ) -> GrammarSpec:
        """`any_whitespace`: the engine's default. `ValueError` for a malformed value."""
        any_whitespace = any_whitespace and not params.disable_any_whitespace
        if params.json is not None:
            return cls(GrammarKind.JSON_SCHEMA, _json_text("json", params.json), any_whitespace)
        if params.json_object is not None:
            if params.json_object is not True:
                raise ValueError("json_object can only be true; leave it out instead")
            return cls(GrammarKind.JSON_SCHEMA, '{"type": "object"}', any_whitespace)
        if params.regex is not None:
            return cls(GrammarKind.REGEX, _text("regex", params.regex))
        if params.choice is not None:
            return cls(GrammarKind.EBNF, _choice(params.choice))
        if params.grammar is not None:
            return cls(GrammarKind.EBNF, _text("grammar", params.grammar))
        tag = _structural_tag(params.structural_tag, any_whitespace)
        return cls(GrammarKind.STRUCTURAL_TAG, tag)

    @property
    def barred_bytes(self) -> bytes:
        """Bytes that no token may add to the text.

        The compiler lets control characters into JSON strings of bounded length, where JSON has
        none; without them as tokens only indentation by tabs is lost.
        """
        bounded = self.kind is GrammarKind.STRUCTURAL_TAG and 'Length"' in self.source
        return _CONTROL if self.kind is GrammarKind.JSON_SCHEMA or bounded else b""

    def compile(self, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
        """Slow (up to seconds), without the GIL; `RuntimeError` for a source that is no grammar."""
        if self.kind is GrammarKind.JSON_SCHEMA:
            return compiler.compile_json_schema(self.source, any_whitespace=self.any_whitespace)
        if self.kind is GrammarKind.REGEX:
            return compiler.compile_regex(self.source)
        if self.kind is GrammarKind.EBNF:
            return compiler.compile_grammar(self.source)
        return compiler.compile_structural_tag(self.source)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {type(value).__name__}")
    return value


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None


def _dump(name: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None


def _json_text(name: str, schema: Any) -> str:
    """The schema as JSON text, in the given order of keys: it is the order of properties."""
    if isinstance(schema, str):
        schema = _parse(name, schema)
    if not isinstance(schema, dict | bool):
        raise ValueError(f"{name} must be a JSON schema (an object), got {type(schema).__name__}")
    return _dump(name, schema)


def _choice(choice: Any) -> str:
    if not isinstance(choice, list) or not all(isinstance(one, str) for one in choice):
        raise ValueError(f"choice must be a list of strings, got {choice!r}")
    if not choice:
        raise ValueError("choice must offer at least one string")
    # The escapes of a JSON string are those of the grammar's string literals.
    return "root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choice)


def _structural_tag(text: Any, any_whitespace: bool) -> str:
    given = _parse("structural_tag", _text("structural_tag", text))
    if not isinstance(given, dict):
        raise ValueError(f"structural_tag must be a JSON object, got {type(given).__name__}")
    if "structures" in given or "triggers" in given:
        given = _from_structures(given)
    return _dump("structural_tag", given if any_whitespace else _with_bounded_space(given))


def _with_bounded_space(tag: Any) -> Any:
    """`tag` whose JSON has at most one space where the schema's grammar allows any number."""
    if isinstance(tag, list):
        return [_with_bounded_space(one) for one in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema":
        return {"max_whitespace_cnt": 1, **tag}
    return {key: _with_bounded_space(value) for key, value in tag.items()}


def _from_structures(given: dict[str, Any]) -> dict[str, Any]:
    """The older form, free text with tags that triggers start, in today's."""
    try:
        tags = [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one["schema"]},
                "end": one["end"],
            }
            for one in given["structures"]
        ]
        triggers = given["triggers"]
    except (KeyError, TypeError) as error:
        raise ValueError(
            "structural_tag needs structures (a list of begin, schema and end) and triggers; "
            f"missing or wrong: {error}"
        ) from None
    triggered = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return {"type": "structural_tag", "format": triggered}
