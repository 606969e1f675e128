# SPDX-License-Identifier: Apache-2.0
"""Tags at the edges of pieces of text."""

import pytest

from vllm.utils.text_tags import find_first, num_held, skip_tag, split_held


def test_first_tag() -> None:
    assert find_first("a<y><x>", ("<x>", "<y>")) == (1, "<y>")
    assert find_first("a<y", ("<x>", "<y>")) is None


@pytest.mark.parametrize(
    ("text", "held"),
    [("", 0), ("a", 0), ("a<", 1), ("a<x", 2), ("<x>", 0), ("<<", 1), ("<x<yz", 3), ("<x<yx", 0)],
)
def test_what_may_begin_a_tag_is_held(text: str, held: int) -> None:
    tags = ("<x>", "<yzy>")
    assert num_held(text, tags) == held
    before, after = split_held(text, tags)
    assert before + after == text and len(after) == held


def test_skipping() -> None:
    assert skip_tag(" \n<x>b", "<x>") == "b"
    assert skip_tag("<x>", "<x>") == ""
    assert skip_tag(" b<x>", "<x>") == " b<x>"
    assert skip_tag("", "<x>") is skip_tag(" <x", "<x>") is None
