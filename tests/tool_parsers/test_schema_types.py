# SPDX-License-Identifier: Apache-2.0
"""Types that a parameter's schema allows."""

from typing import Any

import pytest

from vllm.tool_parsers.qwen3_coder import ANY_TYPE, json_type, parameter_types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["string", ["null"]]}, {"string"}),
        ({"type": {"type": "string"}}, set()),
        ({}, ANY_TYPE),
        (True, ANY_TYPE),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]}, ANY_TYPE),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"const": 1}, {"$ref": "#/$defs/Word"}]}, {"integer", "string"}),
        ({"allOf": [{"type": ["string", "array"]}, {"type": "array"}]}, {"array"}),
        ({"$ref": "#/$defs/Word"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/Missing"}, ANY_TYPE),
        ({"$ref": "#/$defs/Loop"}, ANY_TYPE),
    ],
)
def test_types(schema: Any, types: set[str]) -> None:
    root = {
        "properties": {"p": schema},
        "$defs": {
            "Word": {"type": "string"},
            "a/b": {"type": "boolean"},
            "Loop": {"$ref": "#/$defs/Loop"},
        },
    }
    assert parameter_types(root, "p") == types


def test_undeclared_parameters_are_strings() -> None:
    for schema in ({}, {"properties": {}}, {"properties": None}):
        assert parameter_types(schema, "p") == {"string"}


def test_types_of_values() -> None:
    values = [None, True, 2, 2.0, 2.5, "a", [1], {"a": 1}]
    names = ["null", "boolean", "integer", "integer", "number", "string", "array", "object"]
    assert [json_type(value) for value in values] == names
