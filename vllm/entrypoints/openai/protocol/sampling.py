# SPDX-License-Identifier: Apache-2.0
"""Fields that completions and chat completions have in common."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator

from vllm.cache_options import CacheOptions
from vllm.entrypoints.openai.protocol.base import (
    Integer,
    Integers,
    JsonObject,
    Number,
    RequestModel,
    StreamOptions,
    Strings,
    refuse,
)
from vllm.sampling_params import StructuredOutputsParams

#: former names of fields. Passed over like other unknown keys, the reply would look right and not
#: be what was asked for
_FORMER_NAMES = {
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}
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


def as_list(value: Any) -> Any:
    """A single string as a list of one."""
    return [value] if isinstance(value, str) else value


#: one string or several
StopStrings = Annotated[Strings | None, BeforeValidator(as_list)]


class GenerationRequest(RequestModel):
    """A request that generates text; null means the server's default everywhere."""

    model: str | None = None
    n: Integer | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    seed: Integer | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    stop: StopStrings = None
    stop_token_ids: Integers | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    allowed_token_ids: Integers | None = None
    bad_words: Strings | None = None
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    prompt_logprobs: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: JsonObject | None = None
    vllm_xargs: JsonObject | None = None
    cache_salt: str | None = None
    cache_checkpoints: Integers | Literal["messages"] | None = None
    cache_pin_seconds: Number | None = None
    return_cache_report: bool | None = None
    priority: Integer | None = 0
    placement: str | Strings | None = None
    request_id: str | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    use_beam_search: bool | None = False
    length_penalty: Number | None = None
    thinking_token_budget: Integer | None = None
    repetition_detection: dict[str, Any] | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def field_names(self) -> dict[str, str]:
        """The engine's parameters -> the fields that they were given in, where these differ."""
        if self.structured_outputs:
            return {}
        if self.response_format is not None and self.response_format.get("type") != "text":
            return {"structured_outputs": "response_format"}
        return {"structured_outputs": "tools"}

    def check_names(self) -> None:
        """Raise `VLLMValidationError` for a field that has another name now."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name in _FORMER_NAMES:
                refuse(name, f"{name} is not supported; use {_FORMER_NAMES[name]}")

    def check_supported(self) -> None:
        """Raise `VLLMValidationError` for a field this server cannot honour."""
        self.check_names()
        structured_outputs(self.response_format, self.structured_outputs)
        if self.use_beam_search and self.stream:
            refuse("stream", "beams are known at the end only; leave out stream or use_beam_search")
        if self.length_penalty not in (None, 1.0) and not self.use_beam_search:
            refuse("length_penalty", "length_penalty belongs to beam search: set use_beam_search")
        if self.thinking_token_budget is not None:
            refuse("thinking_token_budget", "not supported; bound the output with `max_tokens`")
        if self.repetition_detection is not None:
            refuse("repetition_detection", "not supported; use `repetition_penalty`")
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "stream_options can only be set together with stream=true")
        if self.stream and self.prompt_logprobs is not None:
            refuse("prompt_logprobs", "prompt_logprobs are not available with stream=true")
        if self.cache_salt == "":
            refuse("cache_salt", "cache_salt must not be empty; leave it out instead")
        self.cache_options()

    def cache_options(self, marks: Sequence[int] = ()) -> CacheOptions:
        """What the request asks of the prefix cache, besides `marks` found in the prompt."""
        offsets = [] if isinstance(self.cache_checkpoints, str) else self.cache_checkpoints or []
        return CacheOptions.validated(
            [*offsets, *marks], self.cache_pin_seconds, self.return_cache_report
        )
