# SPDX-License-Identifier: Apache-2.0
"""Ends reasoning that takes too many tokens, so that the constrained answer behind it comes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm.sampling_params import ReasoningBudget


class TokenTexts:
    """The bytes of each token of a vocabulary, and the tokens that spell a text."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts
        self._spellings: dict[bytes, list[list[int] | None]] = {}

    def joined(self, token_ids: Sequence[int]) -> bytes:
        """The text of `token_ids [n]`."""
        return b"".join(self._texts[token] for token in token_ids)

    def spellings(self, text: bytes) -> list[list[int] | None]:
        """Tokens, the longest first, for `text[n:]` of every n in `[0, len(text))`; None where the
        vocabulary has none. Slow for a new text: a look at every token."""
        if text not in self._spellings:
            parts = {part: token for token, part in enumerate(self._texts) if part and part in text}
            by_length = sorted(parts.items(), key=lambda one: -len(one[0]))
            self._spellings[text] = [_spell(text[n:], by_length) for n in range(len(text))]
        return self._spellings[text]


def _spell(text: bytes, by_length: list[tuple[bytes, int]]) -> list[int] | None:
    tokens, at = [], 0
    while at < len(text):
        fitting = ((part, token) for part, token in by_length if text.startswith(part, at))
        part, token = next(fitting, (b"", 0))
        if not part:
            return None
        tokens.append(token)
        at += len(part)
    return tokens


class ReasoningLimit:
    """The closing tag of one request's reasoning, token by token once its budget is used up.

    A function of the accepted tokens, as the grammar is: tokens may be taken back.
    """

    def __init__(self, budget: ReasoningBudget, texts: TokenTexts) -> None:
        self._max_tokens = budget.max_tokens
        self._begin, self._end = budget.begin.encode(), budget.end.encode()
        self._texts = texts
        #: what closes the reasoning, and the accepted tokens before that
        self._closing: list[int] = []
        self._forced_at: int | None = None
        #: accepted tokens when the reasoning was found to be over
        self._over_at: int | None = None

    def rewind(self, num_tokens: int) -> None:
        """All but the first `num_tokens` accepted tokens are taken back; called before others come
        in their stead."""
        if self._over_at is not None and num_tokens < self._over_at:
            self._over_at = None
        if self._forced_at is not None and num_tokens < self._forced_at:
            self._forced_at = None

    def narrow(self, mask: np.ndarray, accepted: Sequence[int]) -> None:
        """Leave the closing tag's next token alone in `mask [words]` int32 where one is due; called
        after each accepted token.

        It waits for the end of a character that has begun, and completes a tag that has.
        """
        num = len(accepted)
        if num < self._max_tokens or self._over_at is not None:
            return
        if self._forced_at is None and not self._begin_closing(accepted):
            return
        assert self._forced_at is not None
        written = num - self._forced_at
        if written == len(self._closing):
            self._over_at = num
            return
        word, bit = divmod(self._closing[written], 32)
        if mask[word] >> bit & 1:
            mask.fill(0)
            mask.view(np.uint32)[word] = np.uint32(1) << np.uint32(bit)
        elif not written:
            self._forced_at = None

    def _begin_closing(self, accepted: Sequence[int]) -> bool:
        """Decide how to close the reasoning, if there is any; False to go on without."""
        text = self._texts.joined(accepted).lstrip()
        if len(text) < len(self._begin) and self._begin.startswith(text):
            return False
        if not text.startswith(self._begin) or self._end in text[len(self._begin) :]:
            self._over_at = len(accepted)
            return False
        if _in_character(text):
            return False
        for overlap, tokens in reversed([*enumerate(self._texts.spellings(self._end))]):
            if tokens is not None and text.endswith(self._end[:overlap]):
                self._closing, self._forced_at = tokens, len(accepted)
                return True
        raise AssertionError("the grammar was taken without tokens for the closing tag")


def _in_character(text: bytes) -> bool:
    """Whether the last bytes begin a character (RFC 3629) and do not complete it."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte & 0xC0 != 0x80:
            return byte >= 0xC0 and back < (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2)
    return False
