# SPDX-License-Identifier: Apache-2.0
"""Banned words as token sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: of one word: each of its tokens is compared at every step
MAX_CHARS = 512


def bad_word_token_ids(
    words: Iterable[str], tokenizer: PreTrainedTokenizerBase | None
) -> list[list[int]]:
    """The sequences whose last token is banned after the others: each word as the text's start
    and after a space, unless the one ends with the other.

    Raises `VLLMValidationError` without a tokenizer, for a word without tokens and for one longer
    than `MAX_CHARS`.
    """
    if tokenizer is None:
        raise VLLMValidationError(
            "bad_words need a tokenizer, but --skip-tokenizer-init is set; use logit_bias",
            "bad_words",
        )
    words = [word.lstrip() for word in words]
    for word in words:
        if len(word) > MAX_CHARS:
            raise VLLMValidationError(
                f"bad_words: {word[:20]!r}… has {len(word)} characters; at most {MAX_CHARS}",
                "bad_words",
            )
    spaced_words = [" " + word for word in words]
    try:
        encoded = tokenizer([*words, *spaced_words], add_special_tokens=False)["input_ids"]
    except (UnicodeEncodeError, TypeError) as error:
        raise VLLMValidationError(f"bad_words cannot be tokenised: {error}", "bad_words") from None
    sequences: list[list[int]] = []
    for word, bare, spaced in zip(words, encoded, encoded[len(words) :], strict=False):
        if not bare:
            raise VLLMValidationError(f"bad_words: {word!r} has no tokens", "bad_words", word)
        sequences.append(list(bare))
        if spaced[-len(bare) :] != bare:
            sequences.append(list(spaced))
    return sequences
