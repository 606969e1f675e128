# SPDX-License-Identifier: Apache-2.0
"""Forms a prompt may take; for the `cache_*` keys see `vllm.cache_options.CacheOptions`."""

from typing import Any, TypeAlias, TypedDict

from typing_extensions import NotRequired


class _Prompt(TypedDict, total=False):
    multi_modal_data: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    cache_salt: str
    cache_checkpoints: list[int]
    cache_pin_seconds: float
    return_cache_report: bool


class TextPrompt(_Prompt):
    """Text, to be tokenised."""

    prompt: str


class TokensPrompt(_Prompt):
    """Token ids, used unchanged; `prompt` is their text, if known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


#: one prompt; a bare list of integers is token ids
PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt
