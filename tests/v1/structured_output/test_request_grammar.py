# SPDX-License-Identifier: Apache-2.0
"""One request's place in its grammar: masks, the end, going back, and having nowhere to go."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from tests.v1.engine.fakes import EOS, VOCAB_SIZE
from tests.v1.structured_output.vocabularies import (
    FIRST_BYTE,
    request_grammar,
    token_texts,
    tokens_of,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.mask_words import num_mask_words, pack_tokens


def make(min_tokens=0, stop_token_ids=None, allowed_token_ids=None, **constraint):
    return request_grammar(
        SamplingParams(
            max_tokens=100,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            allowed_token_ids=allowed_token_ids,
            structured_outputs=StructuredOutputsParams(**constraint),
        )
    )


def next_tokens(grammar):
    masks = np.zeros((3, grammar.num_words), dtype=np.int32)
    grammar.fill(masks, 1)
    assert not masks[0].any() and not masks[2].any(), "only its own row"
    return tokens_of(masks[1])


def byte(character):
    return FIRST_BYTE + ord(character)


def texts(tokens):
    return {token_texts()[token].decode() for token in tokens}


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_packing(vocab_size):
    tokens = [t for t in (0, 5, 31, 32, 63, 64, 999) if t < vocab_size]
    words = pack_tokens(tokens, vocab_size)
    assert words.dtype == np.int32 and words.shape == (num_mask_words(vocab_size),)
    found = [t for t in range(vocab_size) if words[t // 32] >> (t % 32) & 1]
    assert found == tokens


def test_masks_follow_the_text():
    grammar = make(regex="a[bc]")
    assert texts(next_tokens(grammar)) == {"a", "ab", "ac"}
    assert grammar.accept(byte("a"))
    assert texts(next_tokens(grammar)) == {"b", "c"}


def test_stop_tokens_only_at_an_end():
    grammar = make(regex="a+")
    assert EOS not in next_tokens(grammar)
    grammar.accept(byte("a"))
    assert EOS in next_tokens(grammar) and not grammar.terminated
    assert grammar.accept(EOS) and grammar.terminated


def test_a_refused_token_changes_nothing():
    grammar = make(regex="ab")
    before = next_tokens(grammar)
    assert not grammar.accept(byte("b"))
    assert not grammar.accept(EOS)
    assert next_tokens(grammar) == before
    assert "bar them all" in grammar.error().message


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_rewind(kept):
    text = [byte("a"), byte("b"), byte("c"), EOS]
    grammar, shorter = make(regex="abc"), make(regex="abc")
    assert all(grammar.accept(token) for token in text)
    assert all(shorter.accept(token) for token in text[:kept])
    grammar.rewind(kept)
    assert not grammar.terminated and next_tokens(grammar) == next_tokens(shorter)
    grammar.rewind(10)
    assert next_tokens(grammar) == next_tokens(shorter)
    assert all(grammar.accept(token) for token in text[kept:])


def test_min_tokens_bars_the_end_while_there_is_more():
    grammar = make(regex="a{1,3}", min_tokens=3, stop_token_ids=[byte("a")])
    assert texts(next_tokens(grammar)) == {"aa"}, "the stop token is barred, its double is not"
    grammar.accept(byte("a"))
    assert texts(next_tokens(grammar)) == {"aa"}
    grammar.accept(byte("a"))
    assert next_tokens(grammar) == [EOS, byte("a")], "nothing but barred tokens is left"
    grammar.accept(byte("a"))
    assert next_tokens(grammar) == [EOS]


def test_allowed_token_ids_narrow_the_grammar():
    grammar = make(regex="[abc]+", allowed_token_ids=[EOS, byte("a"), byte("z")])
    assert next_tokens(grammar) == [byte("a")]
    grammar.accept(byte("a"))
    assert next_tokens(grammar) == [EOS, byte("a")]


def test_stuck_when_nothing_is_left():
    grammar = make(regex="ab", allowed_token_ids=[byte("a")])
    assert grammar.accept(byte("a"))
    assert len(next_tokens(grammar)) == VOCAB_SIZE
    assert not grammar.accept(byte("b")), "whatever was sampled is not the grammar's"
    assert "no token may follow" in grammar.error().message
    grammar.rewind(0)
    assert next_tokens(grammar) == [byte("a")]


@pytest.mark.parametrize("lead", [0xC3, 0xE0, 0xE4, 0xED, 0xF0, 0xF1, 0xF4])
def test_only_utf8_is_spelled(lead):
    grammar = make(regex=".*")
    assert grammar.accept(FIRST_BYTE + lead)
    seconds = {token - FIRST_BYTE for token in next_tokens(grammar)}
    tail = bytes([0x80] * (0 if lead < 0xE0 else 1 if lead < 0xF0 else 2))
    assert seconds == {b for b in range(256) if is_utf8(bytes([lead, b]) + tail)}


def is_utf8(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_compilation():
    pending: Future = Future()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    grammar = request_grammar(params, pending)
    assert not grammar.ready and not grammar.terminated
    pending.set_exception(RuntimeError("too hard"))
    assert grammar.ready and "too hard" in (grammar.compile_error() or "")
    assert make(regex="a").compile_error() is None
