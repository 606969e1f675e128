# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/v1/completions`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from vllm.entrypoints.openai.protocol.base import Integer, ReplyModel, UsageInfo, refuse
from vllm.entrypoints.openai.protocol.sampling import GenerationRequest

#: one prompt: text, or token ids
Prompt = str | list[int]


def is_token_ids(value: Any) -> bool:
    """Whether `value` is a list of integers (booleans are not)."""
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_prompt(value: Any) -> Any:
    """One pass over what may be a hundred thousand token ids, with one clear message."""
    if isinstance(value, str) or is_token_ids(value):
        return value
    if isinstance(value, list) and (
        all(isinstance(item, str) for item in value) or all(is_token_ids(item) for item in value)
    ):
        return value
    raise ValueError(
        "expected a string, a list of strings, a list of token ids, or a list of such lists"
    )


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


def _refuse_embeds(value: Any) -> Any:
    if value is not None:
        raise ValueError("prompt embeddings are not supported; send `prompt`")
    return value


class CompletionRequest(GenerationRequest):
    """Body of a completion request."""

    #: before `prompt`, which clients leave out then: the first error is the one to name
    prompt_embeds: Annotated[Any | None, AfterValidator(_refuse_embeds)] = None
    prompt: Annotated[Any, PlainValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)] = Field()
    logprobs: Integer | None = None
    echo: bool | None = False
    add_special_tokens: bool | None = True
    suffix: str | None = None
    best_of: Integer | None = None

    def check_supported(self) -> None:
        super().check_supported()
        if self.cache_checkpoints == "messages":
            refuse("cache_checkpoints", "a plain prompt has no messages; send token offsets")
        if self.suffix:
            refuse("suffix", "suffix is not supported; put the whole text in `prompt`")
        if (self.best_of or 0) > self.num_choices:
            refuse("best_of", "best_of is not supported; ask for `n` with logprobs and choose")
        if self.max_tokens == 0 and not self.echo:
            refuse("max_tokens", "max_tokens must be at least 1 unless echo is true")

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts in request order."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and type(self.prompt[0]) is int:
            return [self.prompt]
        return self.prompt


class CompletionLogprobs(ReplyModel):
    """Parallel lists over the returned tokens; the first entry of an echoed prompt is null."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionChoice(ReplyModel):
    """One generated text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionResponse(ReplyModel):
    """Reply of a completion request."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    kv_transfer_params: dict[str, Any] | None = None
    cache_report: dict[str, Any] | None = None
