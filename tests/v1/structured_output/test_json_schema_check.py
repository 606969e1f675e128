# SPDX-License-Identifier: Apache-2.0
"""A schema that passes is followed to the letter by every text its grammar allows."""

from __future__ import annotations

import json
import random

import jsonschema_rs
import numpy as np
import pytest
import xgrammar

from vllm.v1.structured_output.json_schema import (
    COMPILED_FORMATS,
    MAX_DEPTH,
    MAX_REFERENCES,
    check_schema,
)
from vllm.v1.structured_output.vocabulary import byte_vocabulary

COMPILER = xgrammar.GrammarCompiler(byte_vocabulary(), max_threads=1, cache_enabled=False)
INT = {"type": "integer"}

REFUSED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": INT},
    "not": {"not": INT},
    "if": {"if": INT, "then": {"minimum": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "deep inside": {"properties": {"a": {"type": "array", "items": {"not": INT}}}},
    "inside a definition": {"$ref": "#/$defs/x", "$defs": {"x": {"not": INT}}},
    "inside what a reference names": {
        "$ref": "#/components/a",
        "components": {"a": {"items": {"$ref": "#/components/b"}}, "b": {"not": INT}}},
    "allOf": {"allOf": [{"required": ["a"]}, {"type": "object"}]},
    "enum beside const": {"enum": [1], "const": 1},
    "anyOf beside minimum": {"anyOf": [INT], "minimum": 3},
    "anyOf beside required": {"type": "object", "properties": {"a": INT},
                              "anyOf": [{"required": ["a"]}]},
    "$ref beside minimum": {"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INT}},
    "anyOf of another type": {"type": "string", "anyOf": [INT]},
    "anyOf without a type": {"type": "string", "anyOf": [{"minLength": 2}]},
    "enum of another type": {"type": "integer", "enum": [1, "a"]},
    "const of another type": {"type": "integer", "const": True},
    "remote reference": {"$ref": "http://example.com/a.json"},
    "dangling reference": {"$ref": "#/$defs/none"},
    "untyped minimum": {"minimum": 3},
    "untyped minLength": {"minLength": 3},
    "untyped required": {"required": ["a"]},
    "multipleOf of numbers": {"type": "number", "multipleOf": 0.5},
    "multipleOf in a range": {"type": "integer", "multipleOf": 3, "minimum": 5},
    "pattern and length": {"type": "string", "pattern": "^a+$", "minLength": 3},
    "format and length": {"type": "string", "format": "email", "maxLength": 9},
    "pattern with a quote": {"type": "string", "pattern": '^"$'},
    "pattern with a coded quote": {"type": "string", "pattern": "^[\\x22]$"},
    "pattern with a newline": {"type": "string", "pattern": "a\\nb"},
    "pattern with a backslash": {"type": "string", "pattern": "a\\\\b"},
    "pattern that looks ahead": {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{2}$"},
    "pattern that looks ahead and denies": {"type": "string", "pattern": "^a(?!b)[a-z]$"},
    "names that look ahead": {"type": "object", "patternProperties": {"^(?=b)[ab]$": INT}},
    "pattern and format": {"type": "string", "format": "date", "pattern": "^20"},
    "undefined required": {"type": "object", "properties": {"a": INT}, "required": ["b"]},
    "patternProperties beside": {"type": "object", "properties": {"a": INT},
                                 "patternProperties": {"a": {"type": "string"}}},
    "a name with an escape beside others": {"type": "object", "properties": {'x"y': INT},
                                            "additionalProperties": INT},
    "unknown type": {"type": "whole"},
    "endless object": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "endless array": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "endless pair": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]},
                                                    "b": {"$ref": "#/$defs/a"}}},
}  # fmt: skip

PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "description": "whole"},
        "age": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 150}, {"type": "null"}],
                "default": None},
        "kind": {"$ref": "#/$defs/Kind"},
        "scores": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1},
                   "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind"],
    "$defs": {"Kind": {"type": "string", "enum": ["a", "b\"c", "ü"]}},
}  # fmt: skip
TREE = {
    "$ref": "#/$defs/Node",
    "$defs": {"Node": {"type": "object", "properties": {
        "value": INT, "children": {"type": "array", "items": {"$ref": "#/$defs/Node"},
                                   "maxItems": 2}},
        "required": ["value"], "additionalProperties": False}},
}  # fmt: skip
ACCEPTED = {
    "person": PERSON,
    "tree": TREE,
    "anything": {},
    "object": {"type": "object"},
    "map": {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 2},
    "named map": {"type": "object", "patternProperties": {"^k[0-9]$": INT},
                  "additionalProperties": False},
    "types": {"type": ["integer", "string", "null"], "minimum": 3, "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[^x]{1,3}-\\d{2}$"},
    "format": {"type": "string", "format": "date"},
    "pattern beside a format that only describes": {"type": "string", "format": "password",
                                                    "pattern": "^[a-z]{2}$"},
    "pattern with the signs of looking ahead": {"type": "string", "pattern": "^[(?=!]\\(?=$"},
    "multipleOf": {"type": "integer", "multipleOf": 3},
    "number": {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 2.5},
    "tuple": {"type": "array", "prefixItems": [INT, {"type": "boolean"}], "items": False,
              "minItems": 2},
    "const": {"const": {"a": [1, "x"]}},
    "reference to an integer": {"type": "integer", "$ref": "#/$defs/x", "$defs": {"x": INT}},
    "references elsewhere": {
        "$ref": "#/components/a",
        "components": {"a": {"type": "object", "properties": {"b": {"$ref": "#/components/b"}},
                             "required": ["b"], "additionalProperties": False}, "b": INT}},
    "allOf one": {"allOf": [{"$ref": "#/$defs/x"}], "description": "d", "$defs": {"x": INT}},
    "false keywords": {"type": "array", "items": INT, "uniqueItems": False, "maxItems": 2},
    "a name with an escape": {"type": "object", "properties": {'x"\\y': INT}, "required": ['x"\\y'],
                              "additionalProperties": False},
    "a property named not": {"type": "object", "properties": {"not": INT}, "required": ["not"]},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(ValueError):
        check_schema(REFUSED[name])


@pytest.mark.parametrize("name", ACCEPTED)
def test_texts_of_an_accepted_schema_follow_it(name):
    schema = ACCEPTED[name]
    check_schema(schema)
    validator = jsonschema_rs.validator_for(schema)
    grammar = COMPILER.compile_json_schema(json.dumps(schema), any_whitespace=False)
    complete = 0
    for seed in range(40):
        text = random_text(grammar, random.Random(seed))
        if text is not None:
            complete += 1
            validator.validate(json.loads(text))
    assert complete >= 10


def random_text(grammar, rng, longest=400):
    """Bytes chosen at random among those allowed, the end preferred; None if it never came."""
    matcher = xgrammar.GrammarMatcher(grammar)
    text = b""
    mask = np.zeros((1, 9), dtype=np.int32)
    while len(text) < longest:
        matcher.fill_next_token_bitmask(mask)
        bits = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:257])
        tokens = bits.tolist()
        if 256 in tokens and rng.random() < 0.5:
            return text.decode()
        # ASCII and what closes: random bytes alone would nearly never end
        closing = [t for t in tokens if chr(t) in '"}]' and t < 128]
        ascii_tokens = [t for t in tokens if 32 <= t < 127] or [t for t in tokens if t < 256]
        if not ascii_tokens:
            return text.decode()
        token = rng.choice(closing if closing and rng.random() < 0.4 else ascii_tokens)
        assert matcher.accept_token(token)
        text += bytes([token])
    return None


@pytest.mark.parametrize("name", [*sorted(COMPILED_FORMATS), "password", "binary", "int32"])
def test_formats_that_are_compiled(name):
    schema = {"type": "string", "format": name, "pattern": "^ $"}
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema)))
    follows_pattern = matcher.accept_string('" "')
    assert follows_pattern is (name not in COMPILED_FORMATS)


def test_deep_schemas_are_refused_quickly():
    schema = INT
    for _ in range(MAX_DEPTH + 1):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="nested"):
        check_schema(schema)


def chain(length):
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": INT}}


def test_references_are_bounded():
    check_schema(chain(MAX_REFERENCES - 2))
    with pytest.raises(ValueError, match="different"):
        check_schema(chain(MAX_REFERENCES + 1))
