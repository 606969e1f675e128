# SPDX-License-Identifier: Apache-2.0
"""Incremental text and stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.engine.tokenizer_fixture import make_character_tokenizer, make_tokenizer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import Detokenizer, StreamDecoder, WindowDecoder, whole_texts
from vllm.v1.engine.logprobs import TokenTexts

TOKENIZER = make_tokenizer()


def feed(detokenizer, ids, per_update=1):
    """Feed tokens; returns (streamed deltas, stop string or None)."""
    deltas = []
    for start in range(0, len(ids), per_update):
        stop = detokenizer.update(ids[start : start + per_update], False)
        last = stop is not None or start + per_update >= len(ids)
        deltas.append(detokenizer.take_new_text(last))
        if stop is not None:
            return deltas, stop
    return deltas, None


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=30), st.text(max_size=10))
def test_pieces_add_up_to_the_text(text, prompt):
    prompt_ids = TOKENIZER.encode(prompt) if prompt else []
    ids = TOKENIZER.encode(text)
    detokenizer = Detokenizer(TOKENIZER, prompt_ids, SamplingParams())
    deltas, _ = feed(detokenizer, ids)
    assert "".join(deltas) == detokenizer.text == text
    assert "\ufffd" not in "".join(deltas) or "\ufffd" in text


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=30), st.integers(0, 5))
def test_window_decoder_agrees_with_the_stream(text, cut):
    ids = TOKENIZER.encode(text)
    window = WindowDecoder(TOKENIZER, ids[:cut], True, True)
    stream = StreamDecoder(TOKENIZER.backend_tokenizer, ids[:cut], True)
    pieces = [(window.decode(i), stream.decode(i)) for i in ids[cut:]]
    whole = TOKENIZER.decode(ids[:cut])
    if not whole.endswith("\ufffd"):
        assert "".join(w for w, _ in pieces) == "".join(s for _, s in pieces)


def test_a_character_appears_only_when_complete():
    ids = TOKENIZER.encode("é漢🙂")
    assert len(ids) == 9  # bytes
    detokenizer = Detokenizer(TOKENIZER, [], SamplingParams())
    assert feed(detokenizer, ids)[0] == ["", "é", "", "", "漢", "", "", "", "🙂"]


def test_a_word_keeps_its_space_except_at_the_beginning_of_a_text():
    tokenizer = make_character_tokenizer()
    ids = tokenizer.encode("the the the")
    assert len(ids) == 3 and tokenizer.decode(ids) == "the the the"
    texts = TokenTexts(tokenizer)
    assert [texts.get(one) for one in ids] == [" the"] * 3
    assert texts.get(tokenizer.convert_tokens_to_ids("the")) == "the"
    bad = tokenizer.convert_tokens_to_ids(["<0xC9>", "<0xC9>"])
    detokenizer = Detokenizer(tokenizer, [], SamplingParams())
    feed(detokenizer, [*ids, *bad, *ids])
    assert detokenizer.text.startswith("the the the")
    assert detokenizer.text.endswith(" the the the")


def test_bytes_that_are_no_text_do_not_break_the_stream():
    bad = TOKENIZER.convert_tokens_to_ids(["Ã", "Ã", "Ã"])
    detokenizer = Detokenizer(TOKENIZER, [], SamplingParams())
    feed(detokenizer, bad + TOKENIZER.encode("hello world"))
    assert detokenizer.text.endswith("world")
    assert len(detokenizer.token_ids) == len(bad) + len(TOKENIZER.encode("hello world"))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["fox", "n fox st", "o", "e quick b"])
def test_stop_strings_across_tokens_never_leak(stop, include):
    text = "the quick brown fox stops here"
    params = SamplingParams(stop=["absent", stop], include_stop_str_in_output=include)
    for per_update in (1, 3, 100):
        detokenizer = Detokenizer(TOKENIZER, [], params)
        deltas, found = feed(detokenizer, TOKENIZER.encode(text), per_update)
        end = text.index(stop) + (len(stop) if include else 0)
        assert found == stop
        assert "".join(deltas) == detokenizer.text == text[:end]


def test_the_stop_that_ends_first_wins():
    params = SamplingParams(stop=["fox stops", "brown"])
    detokenizer = Detokenizer(TOKENIZER, [], params)
    stop = detokenizer.update(TOKENIZER.encode("the quick brown fox stops here"), False)
    assert stop == "brown" and detokenizer.text == "the quick "


def test_held_back_text_is_released_at_the_end():
    detokenizer = Detokenizer(TOKENIZER, [], SamplingParams(stop=["foxes"]))
    deltas, stop = feed(detokenizer, TOKENIZER.encode("brown fox"))
    assert stop is None and "".join(deltas) == "brown fox"
    assert len("".join(deltas[:-1])) <= len("brown fox") - 4


def test_min_tokens_keeps_stop_strings_quiet():
    ids = TOKENIZER.encode("fox fox fox fox")
    detokenizer = Detokenizer(TOKENIZER, [], SamplingParams(stop=["fox"], min_tokens=len(ids)))
    _, stop = feed(detokenizer, ids)
    assert stop == "fox" and len(detokenizer.token_ids) == len(ids)
    assert detokenizer.text == "fox fox fox "


def test_stop_token_text_is_left_out_unless_asked_for():
    ids = TOKENIZER.encode("hello world")
    for include, expected in ((False, TOKENIZER.decode(ids[:-1])), (True, "hello world")):
        detokenizer = Detokenizer(TOKENIZER, [], SamplingParams(include_stop_str_in_output=include))
        detokenizer.update(ids, True)
        assert detokenizer.text == expected and detokenizer.token_ids == ids


def test_special_tokens():
    ids = [*TOKENIZER.encode("hello"), TOKENIZER.eos_token_id]
    for skip, expected in ((True, "hello"), (False, "hello<eos>")):
        detokenizer = Detokenizer(TOKENIZER, [], SamplingParams(skip_special_tokens=skip))
        feed(detokenizer, ids)
        assert detokenizer.text == expected


def test_ids_past_the_tokenizer_have_no_text():
    detokenizer = Detokenizer(TOKENIZER, [5000], SamplingParams())
    feed(detokenizer, [5000, *TOKENIZER.encode("hello"), 5001])
    assert detokenizer.text == "hello"


def test_without_tokenizer_or_detokenize_there_is_no_text():
    for tokenizer, params in (
        (None, SamplingParams()),
        (TOKENIZER, SamplingParams(detokenize=False)),
    ):
        detokenizer = Detokenizer(tokenizer, [], params)
        assert detokenizer.update([5, 6], False) is None
        assert (detokenizer.text, detokenizer.token_ids) == ("", [5, 6])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 420), max_size=40), st.integers(0, 8), st.booleans())
def test_whole_texts_change_no_piece(ids, cut, skip):
    """Any ids, also bytes that are no text, special tokens and ids without a token."""
    backend = TOKENIZER.backend_tokenizer
    alone = StreamDecoder(backend, ids[:cut], skip)
    table = StreamDecoder(backend, ids[:cut], skip, whole_texts(TOKENIZER, skip))
    assert [table.decode(i) for i in ids[cut:]] == [alone.decode(i) for i in ids[cut:]]


def test_tokenizers_that_join_texts_otherwise_have_no_table():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    assert whole_texts(PreTrainedTokenizerFast(tokenizer_object=backend), True) is None
    assert whole_texts(TOKENIZER, True) is whole_texts(TOKENIZER, True)
    assert whole_texts(TOKENIZER, True) is not whole_texts(TOKENIZER, False)
