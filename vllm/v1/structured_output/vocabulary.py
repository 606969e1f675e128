# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's vocabulary as the grammar compiler sees it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm.v1.structured_output.mask_words import pack_tokens

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

    from vllm.sampling_params import SamplingParams

#: lead byte -> first and last second byte that are wrong after it
_WRONG_SECOND = {
    0xE0: (0x80, 0x9F),
    0xED: (0xA0, 0xBF),
    0xF0: (0x80, 0x8F),
    0xF4: (0x90, 0xBF),
}
_WRONG = re.compile(
    rb"[\xc0\xc1\xf5-\xff]|\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]"
)


def never_utf8(text: bytes) -> bool:
    """Whether no valid text contains these bytes."""
    return _WRONG.search(text) is not None


class Utf8Guard:
    """Which tokens may not follow a token that ends in a lead byte; `texts`: bytes per token.

    Grammars run on bytes, and their character classes take any lead byte with any continuation
    bytes. Overlong forms, surrogates and code points past U+10FFFF are excluded by the second byte
    (RFC 3629, section 4), or by the first alone.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._lead_of = {
            token: text[-1] for token, text in enumerate(texts) if text[-1:] and text[-1] > 0xDF
        }
        self._may_follow = {
            lead: ~pack_tokens(
                [token for token, text in enumerate(texts) if text and low <= text[0] <= high],
                len(texts),
            )
            for lead, (low, high) in _WRONG_SECOND.items()
        }

    def narrow(self, mask: np.ndarray, last_token: int) -> None:
        """Clear bits of `mask [words]` int32 in place; `last_token` is the one before."""
        allowed = self._may_follow.get(self._lead_of.get(last_token, 0))
        if allowed is not None:
            mask &= allowed


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that `skip_special_tokens` leaves out of the text."""
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def end_tokens(params: SamplingParams, vocab_size: int) -> list[int]:
    """What may end a text; tokenizers and generation configs name tokens the model has not."""
    return [token for token in params.eos_token_ids or () if 0 <= token < vocab_size]


def full_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    stop_token_ids: list[int],
    special_as_text: bool,
    barred_bytes: bytes = b"",
) -> xgrammar.TokenizerInfo:
    """Every token with the bytes it adds to the text; without any, a grammar never allows it.

    Unless `special_as_text`, special tokens add nothing: they would satisfy a grammar with text
    that the client does not get to see. Tokens with one of `barred_bytes`, or with bytes that are
    in no UTF-8 text, are left out, too.
    """
    import xgrammar

    given = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids
    )
    left_out = set() if special_as_text else special_token_ids(tokenizer)
    barred = set(barred_bytes)
    texts = [
        b"" if i in left_out or not barred.isdisjoint(text) or never_utf8(text) else text
        for i, text in enumerate(given.decoded_vocab)
    ]
    return xgrammar.TokenizerInfo(
        texts,
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=stop_token_ids,
        add_prefix_space=given.add_prefix_space,
    )


def byte_vocabulary() -> xgrammar.TokenizerInfo:
    """One token per byte, and a stop token: what any text can be made of."""
    import xgrammar

    texts = [bytes([byte]) for byte in range(256)]
    return xgrammar.TokenizerInfo(
        [*texts, b""], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256]
    )


def added_token_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> xgrammar.TokenizerInfo:
    """Added tokens alone, at their ids: what structural tags may call by name; cheap to use."""
    import xgrammar

    texts = [b""] * vocab_size
    for index, token in tokenizer.added_tokens_decoder.items():
        if index < vocab_size:
            texts[index] = token.content.encode()
    return xgrammar.TokenizerInfo(
        texts, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[vocab_size - 1]
    )
