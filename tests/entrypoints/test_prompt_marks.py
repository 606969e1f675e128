# SPDX-License-Identifier: Apache-2.0
"""Offsets in a conversation, for templates that are easy and for ones that refuse parts of it."""

from __future__ import annotations

import os

import pytest

from vllm.entrypoints.openai.prompt_marks import (
    Preambles,
    common_characters,
    common_prefix,
    message_ends,
    preamble_ids,
    preamble_of,
)
from vllm.exceptions import VLLMValidationError

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}


def ids(text):
    return list(text.encode())


def simple(messages, add_generation_prompt):
    text = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
    return ids(text + ("<assistant>" if add_generation_prompt else ""))


def needs_a_user(messages, add_generation_prompt):
    if not any(m["role"] == "user" for m in messages):
        raise VLLMValidationError("no user query")
    return simple(messages, add_generation_prompt)


def refuses_everything(messages, add_generation_prompt):
    raise VLLMValidationError("no")


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


@pytest.mark.parametrize(
    "messages, count",
    [([SYSTEM, USER], 1), ([USER, SYSTEM], 0), ([SYSTEM, SYSTEM, USER], 2), ([SYSTEM], 1), ([], 0)],
)
def test_preamble(messages, count):
    assert preamble_of(messages) == messages[:count]


@pytest.mark.parametrize("render", [simple, needs_a_user])
def test_preamble_ends_before_the_first_users_words(render):
    assert preamble_ids([SYSTEM], render) == ids("<system>be brief\n<user>")


def test_no_preamble_where_the_template_refuses():
    assert preamble_ids([SYSTEM], refuses_everything) == []


def text_of(render):
    return lambda messages, add_generation_prompt: bytes(
        render(messages, add_generation_prompt)
    ).decode()


def ends(messages, render):
    """Of every part of a conversation with a token per byte."""
    parts = [messages[:count] for count in range(1, len(messages) + 1)]
    text = text_of(simple if render is refuses_everything else render)(messages, True)
    return message_ends(parts, text, text_of(render), range(1, len(text) + 1))


def test_message_ends():
    messages = [SYSTEM, USER, ANSWER, USER]
    lengths = [len(simple(messages[:n], False)) for n in range(1, 5)]
    assert ends(messages, simple) == lengths
    assert ends(messages, needs_a_user) == lengths[1:]
    assert ends(messages, refuses_everything) == []


def test_a_token_across_the_end_of_a_message_does_not_count():
    text = text_of(simple)([USER, ANSWER], True)
    end = len(text_of(simple)([USER], False))
    token_ends = [3, end - 2, end + 1, len(text)]
    assert message_ends([[USER]], text, text_of(simple), token_ends) == [2]
    assert message_ends([[USER]], text, text_of(simple), [3, end, len(text)]) == [2]


def test_a_template_that_rewrites_history_gives_the_shared_part():
    """Some drop the reasoning of earlier answers: what differs is not marked."""

    def rewrites(messages, add_generation_prompt):
        last = len(messages) - 1
        shown = [
            {**m, "content": m["content"] if i == last else m["content"][:1]}
            for i, m in enumerate(messages)
        ]
        return simple(shown, add_generation_prompt)

    whole = rewrites([USER, ANSWER], True)
    assert ends([USER, ANSWER], rewrites) == [len("<user>h"), len(whole) - 11]


@pytest.mark.parametrize("a", ["", "a", "abcd", "abce", "xbcd", "abcdefgh"])
@pytest.mark.parametrize("b", ["", "abcd", "abcx", "abcdefg"])
def test_common_characters(a, b):
    assert common_characters(a, b) == len(os.path.commonprefix([a, b]))


def test_the_latest_preambles_are_remembered():
    rendered = []

    def render(messages, add_generation_prompt):
        rendered.append(messages[0]["content"])
        return simple(messages, add_generation_prompt)

    preambles = Preambles(max_size=2)

    def end(word):
        system = {"role": "system", "content": word}
        whole = simple([system, USER], True)
        return bytes(whole[: preambles.end_in(whole, [system], word, render)])

    for word in ("a", "b", "a", "c", "a"):
        assert end(word) == f"<system>{word}\n<user>".encode()
    assert rendered == ["a", "a", "b", "b", "c", "c"]
    end("b")
    assert rendered[6:] == ["b", "b"], "the least recently used one was dropped"
