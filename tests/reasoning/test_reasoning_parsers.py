# SPDX-License-Identifier: Apache-2.0
"""Reasoning and content, whole and in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.exceptions import VLLMValidationError
from vllm.reasoning import reasoning_parsers

QWEN_OFF = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def whole(name: str, text: str, prompt: str = "", continued: str = "") -> tuple[str, str]:
    delta = reasoning_parsers.get(name)(prompt, continued).parse(text)
    return delta.reasoning, delta.content


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_tags_in_the_reply(name: str) -> None:
    assert whole(name, "<think>\na\n</think>\n\nb") == ("\na\n", "\n\nb")
    assert whole(name, "\n <think>a</think>b</think><think>") == ("a", "b</think><think>")
    assert whole(name, "<think>cut </thi") == ("cut </thi", "")
    assert whole(name, "<think></think>") == ("", "")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "nemotron_v3"])
def test_tags_in_the_prompt(name: str) -> None:
    assert whole(name, "a</think>b", "assistant\n<think>\n") == ("a", "b")
    assert whole(name, "<think>a</think>b", "assistant\n<think>\n") == ("a", "b")
    assert whole(name, "a</think>b", QWEN_OFF) == ("", "a</think>b")
    assert whole(name, "<think>a", QWEN_OFF) == ("", "<think>a")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_continued_messages(name: str) -> None:
    assert whole(name, "b</think>c", "..<think>a", "<think>a") == ("b", "c")
    assert whole(name, "c", "<think>a</think>b", "<think>a</think>b") == ("", "c")
    assert whole(name, "c", "ab", "ab") == ("", "c")


def test_without_tags_the_models_differ() -> None:
    text = " all <thin"
    assert whole("qwen3", text) == ("", text)
    assert whole("deepseek_r1", text) == (text, "")
    for start in ("", "\n", "<thi"):
        assert whole("qwen3", start) == ("", start)
        assert whole("deepseek_r1", start) == (start, "")


def test_the_question_may_mention_tags() -> None:
    assert whole("qwen3", "a", "user\nwhat is <think><|im_end|>\nassistant\n") == ("", "a")


def test_pieces_go_out_at_once() -> None:
    parser = reasoning_parsers.get("qwen3")()
    assert [parser.feed(part).reasoning for part in ("<thi", "nk>", "a", "b</", "i")] == [
        *("", "", "a", "b", "</i"),
    ]
    assert parser.feed("</think>c").content == "c"


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<thi", "nk>", "</", "think", ">", "\n", " ", "x", "é🙂", "<"]
)


@given(
    st.sampled_from(["qwen3", "deepseek_r1"]),
    st.lists(FRAGMENTS, max_size=10),
    st.sampled_from(["", "<think>\n", QWEN_OFF]),
    st.sampled_from(["", "<think>a", "b"]),
)
def test_streaming_equals_parsing_at_once(
    name: str, parts: list[str], prompt: str, continued: str
) -> None:
    text = "".join(parts)
    expected = whole(name, text, prompt, continued)
    for cut in (parts, list(text)):
        parser = reasoning_parsers.get(name)(prompt, continued)
        deltas = [*(parser.feed(part) for part in cut), parser.finish()]
        reasoning = "".join(delta.reasoning for delta in deltas)
        assert (reasoning, "".join(delta.content for delta in deltas)) == expected
        kinds = [kind for d in deltas for kind in ("r" * bool(d.reasoning) + "c" * bool(d.content))]
        assert kinds == sorted(kinds, reverse=True)


def test_unknown_names() -> None:
    with pytest.raises(VLLMValidationError, match="available: deepseek_r1, .*qwen3"):
        reasoning_parsers.get("o1")
