# SPDX-License-Identifier: Apache-2.0
"""`response_format` and `structured_outputs` as the engine's parameters."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from vllm.entrypoints.openai.protocol.sampling import structured_outputs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

HI = [{"role": "user", "content": "hi"}]
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


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 4}),
    ],
)
async def test_former_names_are_refused_with_the_new_ones(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """Ignored, the text would be free and the tools unknown to the model."""
    for name, now in [
        ("guided_json", "structured_outputs.json"),
        ("guided_choice", "structured_outputs.choice"),
        ("functions", "tools"),
    ]:
        reply = await client.post(path, json={**body, name: ["a"]})
        message = reply.json()["error"]["message"]
        assert reply.status_code == 400 and f"{name} is not supported; use {now}" in message
        assert (await client.post(path, json={**body, name: None})).status_code == 200
