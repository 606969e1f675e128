# SPDX-License-Identifier: Apache-2.0
"""Which JSON types a schema allows for a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: nesting of references and alternatives that is followed; recursive schemas exist
_MAX_DEPTH = 16

#: every type, for a schema that says nothing
ANY_TYPE = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


def json_type(value: Any) -> str:
    """The JSON type of a parsed value; whole numbers are `integer`, also as 2.0."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def parameter_types(schema: Mapping[str, Any], parameter: str) -> frozenset[str]:
    """The types that the object schema `schema` allows for `parameter`.

    A parameter it does not declare is a string.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or parameter not in properties:
        return frozenset({"string"})
    return _types(properties[parameter], schema, 0)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ANY_TYPE
    allowed = ANY_TYPE
    if isinstance(reference := schema.get("$ref"), str):
        allowed &= _types(_resolve(reference, root), root, depth + 1)
    if "type" in schema:
        named = schema["type"]
        names = frozenset(named if isinstance(named, list) else [named])
        allowed &= names | ({"integer"} if "number" in names else frozenset())
    if isinstance(values := schema.get("enum"), list):
        allowed &= frozenset(map(json_type, values))
    if "const" in schema:
        allowed &= {json_type(schema["const"])}
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            allowed &= frozenset().union(*(_types(one, root, depth + 1) for one in options))
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            allowed &= _types(part, root, depth + 1)
    return allowed


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of a local reference; None, which allows anything, if it is missing."""
    target: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target
