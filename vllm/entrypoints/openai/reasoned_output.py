# SPDX-License-Identifier: Apache-2.0
"""Structured output of a model that reasons first: the constraint begins behind the reasoning."""

from __future__ import annotations

import json
from typing import Any

from vllm.entrypoints.openai.protocol.base import refuse
from vllm.reasoning import ReasoningParser
from vllm.sampling_params import ReasoningBudget, StructuredOutputsParams

#: tokens of a reply that reasoning leaves to the answer, at least
_ANSWER_TOKENS = 256


def reasoning_tokens(max_tokens: int) -> int:
    """How many of a constrained reply's `max_tokens` may be reasoning: what exceeds 256, at most
    half."""
    return max(0, min(max_tokens // 2, max_tokens - _ANSWER_TOKENS))


def constrain_after_reasoning(
    constraint: StructuredOutputsParams, parser: ReasoningParser, max_tokens: int
) -> StructuredOutputsParams:
    """The constraint for a whole reply of at most `max_tokens`, whose reasoning is bounded.

    The same one if the reply begins with its content. Raises `VLLMValidationError` for a structural
    tag in the older form and for malformed JSON.
    """
    if not parser.may_reason():
        return constraint
    bounds, allowed = parser.bounds(), reasoning_tokens(max_tokens)
    if bounds is not None and bounds[0] and not allowed:
        return constraint
    tag = {"type": "structural_tag", "format": parser.with_reasoning(_content_format(constraint))}
    return StructuredOutputsParams(
        structural_tag=json.dumps(tag),
        disable_any_whitespace=constraint.disable_any_whitespace,
        reasoning=None if bounds is None else ReasoningBudget(*bounds, allowed),
    )


def _content_format(constraint: StructuredOutputsParams) -> dict[str, Any]:
    """The constraint in the language of structural tags."""
    if constraint.json is not None:
        return {"type": "json_schema", "json_schema": _parsed("json", constraint.json)}
    if constraint.json_object is not None:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if constraint.regex is not None:
        return {"type": "regex", "pattern": constraint.regex}
    if constraint.choice is not None:
        options = [{"type": "const_string", "value": text} for text in constraint.choice]
        return {"type": "or", "elements": options}
    if constraint.grammar is not None:
        return {"type": "grammar", "grammar": constraint.grammar}
    tag = _parsed("structural_tag", constraint.structural_tag)
    inner = tag.get("format") if isinstance(tag, dict) else None
    if not isinstance(inner, dict):
        refuse(
            "structured_outputs",
            "with reasoning, a structural tag needs the key `format`; give it that, or switch "
            "reasoning off in chat_template_kwargs",
        )
    return inner


def _parsed(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        refuse("structured_outputs", f"structured_outputs: {name} is not valid JSON: {error}")
