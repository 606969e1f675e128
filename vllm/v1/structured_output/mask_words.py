# SPDX-License-Identifier: Apache-2.0
"""Sets of tokens as bits of int32 words; the lowest bit of word 0 is token 0."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

WORD_BITS = 32


class FilledMasks(NamedTuple):
    """The masks of a step: `words [rows, words]` int32. Of each constrained request, in order,
    `counts` rows: for its next token, and for those after its first drafts."""

    words: np.ndarray
    counts: list[int]


def num_mask_words(vocab_size: int) -> int:
    """Words that hold one bit per token."""
    return -(-vocab_size // WORD_BITS)


def pack_tokens(token_ids: list[int], vocab_size: int) -> np.ndarray:
    """A mask `[words]` int32 with the bits of `token_ids` set."""
    bits = np.zeros(num_mask_words(vocab_size) * WORD_BITS, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
