# SPDX-License-Identifier: Apache-2.0
"""Random prompts as text that tokenises to the wanted number of tokens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: distinct tokens that prompts are drawn from
_POOL = 8192
#: rounds of encoding and cutting before a prompt is taken as it is
_ROUNDS = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class RandomPrompts:
    """Draws tokens that are text on their own, so that a prompt can be cut between any two."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._num_special = int(tokenizer.num_special_tokens_to_add())
        self._pool = self._make_pool()

    def _make_pool(self) -> list[int]:
        special = set(self._tokenizer.all_special_ids)
        ids = [i for i in range(len(self._tokenizer)) if i not in special]
        self._random.shuffle(ids)
        pool = []
        for token in ids:
            text = self._text([token])
            if text.strip() and _REPLACEMENT not in text:
                pool.append(token)
                if len(pool) == _POOL:
                    break
        return pool

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def tokens(self, count: int) -> list[int]:
        """`count` random token ids."""
        return self._random.choices(self._pool, k=count)

    def prompt(self, prefix: list[int], count: int) -> tuple[str, int]:
        """Text of `prefix` and `count` random tokens, and how many tokens it is to a server.

        That is `len(prefix) + count`, special tokens of the tokenizer included; where merges keep a
        text from reaching this, the true number is returned.
        """
        wanted = max(1, len(prefix) + count - self._num_special)
        ids = (prefix + self.tokens(count))[:wanted]
        for _ in range(_ROUNDS):
            text = self._text(ids)
            encoded = list(self._tokenizer.encode(text, add_special_tokens=False))
            if len(encoded) == wanted:
                break
            ids = encoded[:wanted] + self.tokens(wanted - len(encoded))
        return text, len(encoded) + self._num_special
