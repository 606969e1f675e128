# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's vocabulary as the grammar compiler sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.structured_output.utf8 import never_utf8

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that `skip_special_tokens` leaves out of the text."""
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


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
