# SPDX-License-Identifier: Apache-2.0
"""A vocabulary for the fake model, grammars over it, and what a request must produce."""

from __future__ import annotations

import zlib
from concurrent.futures import Future
from functools import lru_cache

import numpy as np
import xgrammar

from tests.v1.engine.fakes import EOS, VOCAB_SIZE
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.grammar import CompiledConstraint, RequestGrammar
from vllm.v1.structured_output.mask_words import pack_tokens
from vllm.v1.structured_output.reasoning_limit import TokenTexts
from vllm.v1.structured_output.spec import GrammarSpec
from vllm.v1.structured_output.vocabulary import Utf8Guard

#: token FIRST_BYTE + b is the byte b; tokens from FIRST_PAIR on are pairs of characters
FIRST_BYTE = 20
FIRST_PAIR = FIRST_BYTE + 256
_PAIR_CHARACTERS = 'abcdefg01-,:{}[]" '


def token_texts() -> list[bytes]:
    texts = [b""] * VOCAB_SIZE
    for byte in range(256):
        texts[FIRST_BYTE + byte] = bytes([byte])
    pairs = [a + b for a in _PAIR_CHARACTERS for b in _PAIR_CHARACTERS]
    for index, pair in enumerate(pairs):
        texts[FIRST_PAIR + index] = pair.encode()
    return texts


@lru_cache
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = xgrammar.TokenizerInfo(
        token_texts(), xgrammar.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[EOS]
    )
    return xgrammar.GrammarCompiler(vocabulary, max_threads=1)


def compiled(constraint: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
    return GrammarSpec.from_params(constraint).compile(compiler())


@lru_cache
def guard() -> Utf8Guard:
    return Utf8Guard(token_texts())


def prepared(constraint: StructuredOutputsParams) -> CompiledConstraint:
    return CompiledConstraint(compiled(constraint), guard(), TokenTexts(token_texts()))


def done(constraint: StructuredOutputsParams) -> Future:
    """A compilation that is over."""
    future: Future = Future()
    future.set_result(prepared(constraint))
    return future


def request_grammar(params: SamplingParams, compilation: Future | None = None) -> RequestGrammar:
    """As the manager makes it, over this vocabulary."""
    assert params.structured_outputs is not None
    allowed = params.allowed_token_ids
    return RequestGrammar(
        compilation or done(params.structured_outputs),
        VOCAB_SIZE,
        [EOS],
        params.min_tokens,
        params.stop_token_ids,
        None if allowed is None else pack_tokens(allowed, VOCAB_SIZE),
        params.structured_outputs.reasoning,
    )


def tokens_of(mask: np.ndarray) -> list[int]:
    """The set bits of `mask [words]`."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return np.flatnonzero(bits).tolist()


def choose(history: list[int], tokens: list[int]) -> int:
    """The "model": one of `tokens`, by a hash of everything before."""
    return tokens[zlib.crc32(np.array(history, dtype=np.int32).tobytes()) % len(tokens)]


def text_of(tokens: list[int]) -> str:
    texts = token_texts()
    return b"".join(texts[token] for token in tokens).decode(errors="replace")


def expected_tokens(prompt: list[int], params: SamplingParams, max_len: int) -> list[int]:
    """Alone, one token at a time, from the grammar library itself."""
    assert params.structured_outputs is not None
    matcher = xgrammar.GrammarMatcher(
        compiled(params.structured_outputs), override_stop_tokens=[EOS]
    )
    output: list[int] = []
    while len(output) < (params.max_tokens or 0) and len(prompt) + len(output) < max_len:
        mask = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
        matcher.fill_next_token_bitmask(mask)
        tokens = tokens_of(mask[0])
        if len(output) < params.min_tokens:
            barred = {EOS, *(params.stop_token_ids or ())}
            tokens = [t for t in tokens if t not in barred] or tokens
        token = choose(prompt + output, tokens)
        assert matcher.accept_token(token)
        output.append(token)
        reached = len(output) >= params.min_tokens
        if matcher.is_terminated() or (reached and token in (params.stop_token_ids or ())):
            break
    return output
