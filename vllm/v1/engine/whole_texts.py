# SPDX-License-Identifier: Apache-2.0
"""Texts of single tokens, for tokenizers where they do not depend on the tokens around."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from tokenizers.decoders import ByteLevel

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"


class WholeTexts(dict[int, "str | None"]):
    """Token id -> its text, decoded at the first look; None where bytes of other tokens may be
    needed to make characters of its own.

    A byte-level decoder joins the tokens' bytes and reads them as UTF-8: behind whole characters, a
    token of whole characters adds exactly its own text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._size = tokenizer.get_vocab_size(with_added_tokens=True)

    def __missing__(self, token_id: int) -> str | None:
        text: str | None = ""
        if token_id < self._size:  # padded vocabularies have ids without text
            text = self.decode([token_id])
            if _REPLACEMENT in text:
                text = None
        self[token_id] = text
        return text

    def decode(self, token_ids: list[int]) -> str:
        """The text of several tokens."""
        decoded: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens
        )
        return decoded

    def end_whole(self, token_ids: list[int]) -> bool:
        """Whether the text of these tokens ends with a whole character."""
        return not self.decode(token_ids).endswith(_REPLACEMENT)


_made: weakref.WeakKeyDictionary[PreTrainedTokenizerFast, dict[bool, WholeTexts]]
_made = weakref.WeakKeyDictionary()


def whole_texts(tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool) -> WholeTexts | None:
    """The texts of a byte-level tokenizer, shared by all requests; None for other tokenizers."""
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.decoder, ByteLevel):
        return None
    made = _made.setdefault(tokenizer, {})
    if skip_special_tokens not in made:
        made[skip_special_tokens] = WholeTexts(backend, skip_special_tokens)
    return made[skip_special_tokens]
