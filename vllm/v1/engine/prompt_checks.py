# SPDX-License-Identifier: Apache-2.0
"""What form a prompt has, and whether its token ids can be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm.cache_options import CacheOptions
from vllm.exceptions import VLLMValidationError

_MEDIA_KEYS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids")


@dataclass(frozen=True)
class ParsedPrompt:
    """Text, token ids (used unchanged), or both."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None
    cache: CacheOptions = CacheOptions()


def _fail(message: str, value: Any = None) -> NoReturn:
    raise VLLMValidationError(message, parameter="prompt", value=value)


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Raise `VLLMValidationError` unless `prompt` is one of the forms of `vllm.inputs`."""
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, list | tuple):
        return ParsedPrompt(token_ids=_as_ids(prompt))
    if not isinstance(prompt, dict):
        _fail(
            "a prompt must be text, a list of token ids, or an object with 'prompt' or "
            f"'prompt_token_ids'; got {type(prompt).__name__}"
        )
    if "prompt_embeds" in prompt:
        _fail("prompt_embeds are not supported; send text or token ids")
    for key in _MEDIA_KEYS:
        if prompt.get(key):
            _fail(f"{key}: multimodal input is not supported; send text or token ids")
    if "encoder_prompt" in prompt or "decoder_prompt" in prompt:
        _fail("encoder-decoder prompts are not supported")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        _fail(f"a prompt object needs 'prompt' or 'prompt_token_ids'; got keys {sorted(prompt)}")
    if text is not None and not isinstance(text, str):
        _fail(f"'prompt' must be text, got {type(text).__name__}")
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise VLLMValidationError(
            "cache_salt must be a non-empty string", parameter="cache_salt", value=salt
        )
    cache = CacheOptions.validated(
        prompt.get("cache_checkpoints"),
        prompt.get("cache_pin_seconds"),
        prompt.get("return_cache_report"),
    )
    return ParsedPrompt(text, None if ids is None else _as_ids(ids), salt, cache)


def _as_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list | tuple):
        _fail(f"token ids must be a list of integers, got {type(ids).__name__}")
    if not set(map(type, ids)) <= {int}:
        bad = next(token_id for token_id in ids if type(token_id) is not int)
        _fail(f"token ids must be integers, got {bad!r} ({type(bad).__name__})", bad)
    return list(ids)


def truncated(
    token_ids: list[int],
    keep: int | None,
    max_model_len: int,
    max_output_tokens: int | None,
    side: str | None = None,
) -> list[int]:
    """The last `keep` ids (`truncate_prompt_tokens`), or with `side` "right" the first ones: it is
    the side that is cut off (`truncation_side`), left if None. None keeps all, -1 what leaves room
    for `max_output_tokens`, or for one token where that is None.

    Raises `VLLMValidationError` for another number than -1 or one in `[1, max_model_len]`.
    """
    if side not in (None, "left", "right"):
        raise VLLMValidationError(
            f"truncation_side must be left or right, got {side!r}", "truncation_side", side
        )
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(1, max_model_len - max(1, max_output_tokens or 1))
    if type(keep) is not int or not 1 <= keep <= max_model_len:
        raise VLLMValidationError(
            f"truncate_prompt_tokens must be -1 or in [1, {max_model_len}], got {keep!r}",
            "truncate_prompt_tokens",
            keep,
        )
    return token_ids[:keep] if side == "right" else token_ids[-keep:]


def check_token_ids(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raise `VLLMValidationError` for an empty or too long prompt or an id outside `[0, vocab)`."""
    if not token_ids:
        _fail("the prompt is empty: at least one token is needed")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        _fail(f"token id {bad} is outside the vocabulary [0, {vocab_size})", bad)
    if len(token_ids) >= max_model_len:
        _fail(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {len(token_ids)} tokens in the prompt, and at least one must be left for "
            "the output. Please shorten the prompt.",
            len(token_ids),
        )
