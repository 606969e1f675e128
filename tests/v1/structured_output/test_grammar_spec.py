# SPDX-License-Identifier: Apache-2.0
"""Normal forms of constraints, and that each form describes what it says."""

from __future__ import annotations

import json

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.spec import MAX_SOURCE_CHARS, GrammarKind, GrammarSpec
from vllm.v1.structured_output.vocabulary import byte_vocabulary

COMPILER = xgrammar.GrammarCompiler(byte_vocabulary(), max_threads=1, cache_enabled=False)


def spec_of(any_whitespace=True, **constraint):
    return GrammarSpec.from_params(StructuredOutputsParams(**constraint), any_whitespace)


def follows(text, **constraint):
    matcher = xgrammar.GrammarMatcher(spec_of(**constraint).compile(COMPILER))
    return (not text or matcher.accept_string(text)) and matcher.is_completed()


def test_kinds():
    assert spec_of(regex="a+") == GrammarSpec(GrammarKind.REGEX, "a+")
    assert spec_of(grammar='root ::= "a"').kind is GrammarKind.EBNF
    assert spec_of(json={"type": "integer"}) == spec_of(json='{ "type":"integer" }')
    assert spec_of(json_object=True).kind is GrammarKind.JSON_SCHEMA


def test_order_of_properties_is_the_schemas():
    first = {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["a", "b"]}
    assert follows('{"a": null, "b": null}', json=first)
    assert not follows('{"b": null, "a": null}', json=first)


@pytest.mark.parametrize("text", ["{}", '{"a": [1, {"b": null}]}', ' {"a" :1 }'])
def test_json_object_is_any_object(text):
    assert follows(text.strip(), json_object=True)


@pytest.mark.parametrize("text", ["[]", "1", '"a"', '{"a"}', ""])
def test_json_object_is_nothing_else(text):
    assert not follows(text, json_object=True)


def test_whitespace():
    schema = {"type": "array", "items": {"type": "integer"}}
    assert follows("[ 1,\n 2]", json=schema) and follows("[1, 2]", json=schema)
    for strict in (
        {"json": schema, "disable_any_whitespace": True},
        {"json": schema, "any_whitespace": False},
    ):
        assert follows("[1, 2]", **strict) and not follows("[ 1,\n 2]", **strict)


@settings(deadline=None, max_examples=60)
@given(choices=st.lists(st.text(max_size=8), min_size=1, max_size=4), other=st.text(max_size=8))
def test_a_choice_is_exactly_its_strings(choices, other):
    matcher = xgrammar.GrammarMatcher(spec_of(choice=choices).compile(COMPILER))
    for text in [*choices, other]:
        fork = matcher.fork()
        accepted = all(fork.accept_token(byte) for byte in text.encode())
        assert (accepted and fork.is_completed()) == (text in choices)


def test_both_forms_of_structural_tags():
    schema = {"type": "integer"}
    old = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f"],
    }
    tag = {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "</f>",
    }
    new = {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]},
    }
    assert spec_of(structural_tag=json.dumps(old)) == spec_of(structural_tag=json.dumps(new))
    assert follows("so: <f>3</f>.", structural_tag=json.dumps(old))
    assert not follows("so: <f>x</f>.", structural_tag=json.dumps(old))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": {"enum": [float("nan")]}}, "cannot be written as JSON"),
        ({"json": {"enum": [object()]}}, "cannot be written as JSON"),
        ({"json_object": False}, "leave it out"),
        ({"regex": 3}, "must be a string"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a" * (MAX_SOURCE_CHARS + 1)}, "at most"),
        ({"choice": []}, "at least one"),
        ({"choice": [1]}, "list of strings"),
        ({"choice": "yes"}, "list of strings"),
        ({"grammar": ["root"]}, "must be a string"),
        ({"structural_tag": "nope"}, "not valid JSON"),
        ({"structural_tag": "[]"}, "must be a JSON object"),
        ({"structural_tag": '{"structures": [{}], "triggers": []}'}, "begin"),
    ],
)
def test_malformed(constraint, message):
    with pytest.raises(ValueError, match=message):
        spec_of(**constraint)


def test_bounded_whitespace_reaches_the_schemas_of_a_structural_tag() -> None:
    schema = {"type": "object", "properties": {"type": {"type": "json_schema"}}}
    inner = {"type": "json_schema", "json_schema": schema}
    tag = json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": [inner]}})
    params = StructuredOutputsParams(structural_tag=tag)
    assert "whitespace" not in GrammarSpec.from_params(params).source
    bounded = json.loads(GrammarSpec.from_params(params, any_whitespace=False).source)
    assert bounded["format"]["elements"] == [{"max_whitespace_cnt": 1, **inner}]
