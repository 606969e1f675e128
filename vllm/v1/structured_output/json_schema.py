# SPDX-License-Identifier: Apache-2.0
"""Which JSON schemas are honoured to the letter.

The grammar compiler passes over some keywords in silence. A text that follows the grammar must
follow the schema, so those are refused here, as is a schema that no finite text follows. Keywords
that only describe are let through, as JSON Schema (draft 2020-12) says of unknown ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

#: deeper schemas take seconds to compile
MAX_DEPTH = 64
MAX_REFERENCES = 512

_HINTS = {
    "uniqueItems": "leave it out and check the result",
    "contains": "describe the items with items or prefixItems",
    "minContains": "use minItems",
    "maxContains": "use maxItems",
    "not": "list what is allowed with enum or anyOf",
    "if": "use anyOf",
    "then": "use anyOf",
    "else": "use anyOf",
    "dependentRequired": "use anyOf",
    "dependentSchemas": "use anyOf",
    "dependencies": "use anyOf",
    "additionalItems": "use prefixItems and items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
#: keywords with schemas inside: by names, which may be those of keywords, in a list, or one
HOLDS_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_HOLDS_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_HOLDS_ONE = (
    "items",
    "additionalProperties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SELECTORS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_OBJECT = (
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
)
#: what allows properties besides the named ones
_MORE_PROPERTIES = ("additionalProperties", "unevaluatedProperties")
_ARRAY = ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")
_STRING = ("pattern", "minLength", "maxLength")
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMBER = (*_RANGE, "multipleOf")
#: keywords that say what a schema without `type` describes
_IMPLIES_TYPE = ("properties", "additionalProperties", "items", "prefixItems")
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_PATTERN_PARTS = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\[\^(?:\\.|[^\]\\])*(?:\]|$)|.", re.DOTALL
)
_NOT_SYNTAX = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
#: formats that decide which strings there are, whatever pattern stands beside them
COMPILED_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)
_ESCAPED_IN_JSON = frozenset('"\\' + "".join(map(chr, range(32))))


def check_schema(schema: Any) -> None:
    """Raise `ValueError` saying where, what and what instead."""
    _Checker(schema).check()


class _Checker:
    """One schema document."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def check(self) -> None:
        schemas = self._schemas()
        for path, schema in schemas:
            self._check_one(path, schema)
        self._check_ends({schema["$ref"] for _, schema in schemas if "$ref" in schema})

    def _schemas(self) -> list[tuple[str, dict[str, Any]]]:
        """Every schema with its place: those of the document, itself first, and then those that
        references name elsewhere in it."""
        found: list[tuple[str, dict[str, Any]]] = []
        seen: set[int] = set()
        starts = [("#", self._root)]
        for start, schema in starts:
            for path, inner in self._inside(schema, start, 0, seen):
                found.append((path, inner))
                if "$ref" in inner:
                    starts.append((inner["$ref"], self._resolve(path, inner["$ref"])))
        return found

    def _inside(
        self, schema: Any, path: str, depth: int, seen: set[int]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """`schema` and every schema inside it, without those in `seen`, which grows."""
        if depth > MAX_DEPTH:
            raise ValueError(f"{path}: schemas may be nested {MAX_DEPTH} deep")
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        yield path, schema
        for key, value in schema.items():
            if key in _HOLDS_ONE:
                yield from self._inside(value, f"{path}/{key}", depth + 1, seen)
            elif key in HOLDS_NAMED and isinstance(value, dict):
                for name, child in value.items():
                    yield from self._inside(child, f"{path}/{key}/{name}", depth + 1, seen)
            elif key in _HOLDS_LIST and isinstance(value, list):
                for index, child in enumerate(value):
                    yield from self._inside(child, f"{path}/{key}/{index}", depth + 1, seen)

    # ---- one schema ----------------------------------------------------------------------------

    def _check_one(self, path: str, schema: dict[str, Any]) -> None:
        for key, hint in _HINTS.items():
            if schema.get(key, False) is not False:
                raise ValueError(f"{path}: {key} is not supported; {hint}")
        selectors = [key for key in _SELECTORS if key in schema]
        if selectors:
            self._check_selector(path, schema, selectors)
            return
        types = _types_of(schema)
        for type_name, keywords in (
            ("object", _OBJECT),
            ("array", _ARRAY),
            ("string", _STRING),
            ("number", _NUMBER),
        ):
            used = [key for key in keywords if key in schema]
            if used and types is None and not any(key in schema for key in _IMPLIES_TYPE):
                raise ValueError(
                    f'{path}: {used[0]} needs a type beside it; add "type": "{type_name}"'
                )
        _check_numbers(path, schema, types)
        _check_string(path, schema)
        _check_object(path, schema)

    def _check_selector(self, path: str, schema: dict[str, Any], selectors: list[str]) -> None:
        others = [k for k in (*_OBJECT, *_ARRAY, *_STRING, *_NUMBER) if k in schema]
        beside = [*selectors[1:], *others]
        if beside:
            raise ValueError(
                f"{path}: {selectors[0]} and {beside[0]} cannot be combined in one schema; "
                f"move {beside[0]} into each alternative"
            )
        allowed = _types_of(schema)
        key = selectors[0]
        value = schema[key]
        if key == "allOf" and isinstance(value, list) and len(value) > 1:
            raise ValueError(f"{path}: allOf of several schemas is not supported; merge them")
        if key == "$ref":
            self._resolve(path, value)
        if allowed is None:
            return
        if key in ("const", "enum"):
            values = value if key == "enum" and isinstance(value, list) else [value]
            wrong = [v for v in values if not any(_is_of_type(v, t) for t in allowed)]
            if wrong:
                raise ValueError(f"{path}: {key} value {wrong[0]!r} is not of the type beside it")
            return
        for branch in value if isinstance(value, list) else [schema]:
            found = self._branch_types(path, branch)
            if found is None or not found <= allowed:
                raise ValueError(
                    f"{path}: the type beside {key} is not that of every alternative; "
                    "move it into each"
                )

    def _branch_types(self, path: str, schema: Any) -> set[str] | None:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._resolve(path, schema["$ref"])
        return _types_of(schema) if isinstance(schema, dict) else None

    def _resolve(self, path: str, reference: Any) -> Any:
        """The schema a `$ref` names, inside this document."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise ValueError(
                f"{path}: $ref {reference!r} must be # or start with #/; put the schema in $defs"
            )
        target = self._root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdigit() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                raise ValueError(f"{path}: $ref {reference!r} names nothing in the schema")
        return target

    # ---- an end to every text ------------------------------------------------------------------

    def _check_ends(self, references: set[str]) -> None:
        """A least fixpoint over the references: which have a finite text."""
        if len(references) > MAX_REFERENCES:
            raise ValueError(f"the schema has more than {MAX_REFERENCES} different $ref")
        ends: set[str] = set()
        grown = True
        while grown:
            grown = False
            for reference in references - ends:
                if self._has_end(self._resolve("#", reference), ends):
                    ends.add(reference)
                    grown = True
        if not self._has_end(self._root, ends):
            raise ValueError("no finite text follows the schema: it requires itself inside itself")

    def _has_end(self, schema: Any, ends: set[str]) -> bool:
        if not isinstance(schema, dict):
            return True
        if "$ref" in schema:
            return schema["$ref"] in ends
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                return any(self._has_end(one, ends) for one in schema[key])
        types = _types_of(schema)
        if types is not None and not types <= {"object", "array"}:
            return True
        properties = schema.get("properties")
        if isinstance(properties, dict):
            required = [properties[name] for name in schema.get("required", ())]
            if not all(self._has_end(one, ends) for one in required):
                return False
        needed = list(schema.get("prefixItems", ()))
        if schema.get("minItems", 0):
            needed.append(schema.get("items", True))
        return all(self._has_end(one, ends) for one in needed)


def _types_of(schema: dict[str, Any]) -> set[str] | None:
    given = schema.get("type")
    if given is None:
        return None
    names = given if isinstance(given, list) else [given]
    for name in names:
        if not isinstance(name, str) or name not in _PYTHON_TYPES:
            raise ValueError(f"unknown type {name!r}; known: {', '.join(_PYTHON_TYPES)}")
    return set(names)


def _is_of_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES[name])


def _check_numbers(path: str, schema: dict[str, Any], types: set[str] | None) -> None:
    if "multipleOf" not in schema or types is None or not types & {"integer", "number"}:
        return
    if "number" in types:
        raise ValueError(f'{path}: multipleOf is not supported beside "type": "number"; drop it')
    if any(key in schema for key in _RANGE):
        raise ValueError(f"{path}: multipleOf and a range cannot be combined; list the values")


def _check_string(path: str, schema: dict[str, Any]) -> None:
    bounds = [key for key in ("minLength", "maxLength") if key in schema]
    for key in ("pattern", "format"):
        if key in schema and bounds:
            raise ValueError(
                f"{path}: {key} and {bounds[0]} cannot be combined; "
                "write the length into a pattern, such as ^[a-z]{2,5}$"
            )
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return
    if schema.get("format") in COMPILED_FORMATS:
        raise ValueError(f"{path}: pattern and format cannot be combined; use one of them")
    _check_pattern(path, pattern)
    if _names_escaped_character(pattern):
        raise ValueError(
            f"{path}: the pattern must not name characters that JSON writes with an escape "
            "(quotation mark, backslash, control characters)"
        )


def _check_pattern(path: str, pattern: str) -> None:
    syntax = _NOT_SYNTAX.sub("", pattern)
    if "(?=" in syntax or "(?!" in syntax:
        raise ValueError(
            f"{path}: lookahead in a pattern is not supported; write the pattern without (?=...) "
            "and (?!...)"
        )


def _names_escaped_character(pattern: str) -> bool:
    for part in _PATTERN_PARTS.findall(pattern):
        if part.startswith("[^"):
            continue
        if part[:1] == "\\" and len(part) > 2:
            character = chr(int(part[2:], 16))
        elif part in ("\\n", "\\r", "\\t", "\\f", "\\v", "\\0"):
            return True
        else:
            character = part[-1]
            if part[:1] == "\\" and character not in '"\\':
                continue
        if character in _ESCAPED_IN_JSON:
            return True
    return False


def _check_object(path: str, schema: dict[str, Any]) -> None:
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise ValueError(f"{path}: properties must be an object")
    required = schema.get("required", ())
    if not isinstance(required, list | tuple) or not all(isinstance(r, str) for r in required):
        raise ValueError(f"{path}: required must be a list of names")
    unknown = [name for name in required if name not in properties]
    if unknown:
        raise ValueError(f"{path}: required names {unknown[0]!r}, which properties does not define")
    open_to = next((key for key in _MORE_PROPERTIES if schema.get(key, False) is not False), None)
    escaped = [name for name in properties if not _ESCAPED_IN_JSON.isdisjoint(name)]
    if open_to is not None and escaped:
        # The compiler's names of others than these would hold such characters as they are.
        raise ValueError(
            f"{path}: {open_to} cannot be combined with the property {escaped[0]!r}, whose name "
            "JSON writes with an escape; rename it, or leave no other properties"
        )
    patterns = schema.get("patternProperties")
    for pattern in patterns if isinstance(patterns, dict) else ():
        _check_pattern(path, pattern)
    for key in ("propertyNames", "patternProperties"):
        if properties and key in schema:
            raise ValueError(f"{path}: properties and {key} cannot be combined; use one of them")
