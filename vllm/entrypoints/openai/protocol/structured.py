# SPDX-License-Identifier: Apache-2.0
"""`response_format` and `structured_outputs` of a request as the engine's one constraint."""

import json
from typing import Any

import msgspec

from vllm.entrypoints.openai.protocol.base import refuse
from vllm.sampling_params import StructuredOutputsParams

_TYPES = ("text", "json_object", "json_schema", "structural_tag")


def structured_outputs(
    response_format: dict[str, Any] | None, extra: dict[str, Any] | None
) -> StructuredOutputsParams | None:
    """The constraint of a request, None for free text.

    `response_format` is OpenAI's; `extra` holds the fields of `StructuredOutputsParams`. Raises
    `VLLMValidationError` for a malformed one, or for both; the grammar itself is checked later.
    """
    wanted = None if response_format is None else _from_response_format(response_format)
    if not extra:
        return wanted
    if wanted is not None:
        refuse(
            "response_format", "response_format and structured_outputs exclude each other; use one"
        )
    known = StructuredOutputsParams.__struct_fields__
    for key in extra:
        if key not in known:
            refuse(
                f"structured_outputs.{key}",
                f"structured_outputs: unknown key {key!r}; known: {', '.join(known)}",
            )
    try:
        return msgspec.convert(extra, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        refuse("structured_outputs", f"structured_outputs: {error}")


def _from_response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        wrapper = given.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if not isinstance(schema, dict):
            refuse(
                "response_format",
                'response_format of type json_schema needs {"json_schema": {"name": ..., "schema": '
                "{...}}}",
            )
        return StructuredOutputsParams(json=schema)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=json.dumps(given))
    refuse(
        "response_format", f"response_format.type must be one of {', '.join(_TYPES)}; got {kind!r}"
    )
