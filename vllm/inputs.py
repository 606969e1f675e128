# SPDX-License-Identifier: Apache-2.0
"""Forms a prompt may take; for the `cache_*` keys see `vllm.cache_options.CacheOptions`."""

from typing import Any, TypeAlias, TypedDict

from typing_extensions import NotRequired


class TextPrompt(TypedDict):
    """Text, to be tokenised."""

    prompt: str
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]
    cache_checkpoints: NotRequired[list[int]]
    cache_pin_seconds: NotRequired[float]
    return_cache_report: NotRequired[bool]


class TokensPrompt(TypedDict):
    """Token ids, used unchanged; `prompt` is their text, if known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]
    cache_checkpoints: NotRequired[list[int]]
    cache_pin_seconds: NotRequired[float]
    return_cache_report: NotRequired[bool]


#: one prompt; a bare list of integers is token ids
PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt
