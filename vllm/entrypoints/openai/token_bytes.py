# SPDX-License-Identifier: Apache-2.0
"""The bytes of single tokens, which may be a part of a character."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
#: a token of one byte where the vocabulary is made of characters
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def _letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2): bytes that Latin-1
    shows are themselves, the others are letters from 256 on, in their order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)).difference(shown))
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_LETTERS = _letters()


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int, text: str) -> list[int] | None:
    """UTF-8 of the token that decodes to `text`; None where its bytes are no whole characters and
    its name does not tell them."""
    if _REPLACEMENT not in text:
        return list(text.encode())
    name = str(tokenizer.convert_ids_to_tokens(token_id))
    if fallback := _FALLBACK.fullmatch(name):
        return [int(fallback[1], 16)]
    values = [_LETTERS[letter] for letter in name if letter in _LETTERS]
    told = bytes(values).decode(errors="replace") == text
    return values if told else None
