# SPDX-License-Identifier: Apache-2.0
"""`response_format` and `structured_outputs` as the engine's parameters."""

from __future__ import annotations

import json

import pytest

from vllm.entrypoints.openai.protocol.sampling import structured_outputs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("text", [None, {"type": "text"}])
@pytest.mark.parametrize("extra", [None, {}])
def test_free_text(text, extra):
    assert structured_outputs(text, extra) is None


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            {"json": SCHEMA},
        ),
    ],
)
def test_response_formats(response_format, expected):
    assert structured_outputs(response_format, None) == StructuredOutputsParams(**expected)


def test_structural_tags_travel_whole():
    given = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
    made = structured_outputs(given, None)
    assert made is not None and json.loads(made.structural_tag or "") == given


@pytest.mark.parametrize(
    "extra",
    [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"json_object": True, "disable_any_whitespace": True},
        {"structural_tag": "{}"},
    ],
)
def test_fields_of_the_engine(extra):
    assert structured_outputs(None, extra) == StructuredOutputsParams(**extra)
    assert structured_outputs({"type": "text"}, extra) == StructuredOutputsParams(**extra)


@pytest.mark.parametrize(
    ("response_format", "extra", "parameter"),
    [
        ({"type": "yaml"}, None, "response_format"),
        ({}, None, "response_format"),
        ({"type": "json_schema"}, None, "response_format"),
        ({"type": "json_schema", "json_schema": []}, None, "response_format"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, None, "response_format"),
        ({"type": "json_object"}, {"regex": "a"}, "response_format"),
        (None, {"regex": "a", "choice": ["b"]}, "structured_outputs"),
        (None, {"disable_any_whitespace": True}, "structured_outputs"),
        (None, {"regex": ["a"]}, "structured_outputs"),
        (None, {"choice": "yes"}, "structured_outputs"),
        (None, {"guided": "a"}, "structured_outputs.guided"),
    ],
)
def test_refused(response_format, extra, parameter):
    with pytest.raises(VLLMValidationError) as error:
        structured_outputs(response_format, extra)
    assert error.value.parameter == parameter
