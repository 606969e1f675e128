# SPDX-License-Identifier: Apache-2.0
"""Finding tags in text that arrives in pieces."""

from collections.abc import Sequence


def find_first(text: str, tags: Sequence[str]) -> tuple[int, str] | None:
    """Position and name of the tag that occurs first in `text`; None without any."""
    found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
    return min(found, default=None)


def num_held(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a tag."""
    firsts = {tag[0] for tag in tags}
    longest = max(map(len, tags)) - 1
    tail = text[-longest:]
    for at, char in enumerate(tail):
        if char in firsts:
            end = tail[at:]
            if any(tag.startswith(end) for tag in tags if len(tag) > len(end)):
                return len(end)
    return 0


def split_held(text: str, tags: Sequence[str]) -> tuple[str, str]:
    """`text` without, and only, the characters that could begin a tag."""
    cut = len(text) - num_held(text, tags)
    return text[:cut], text[cut:]


def skip_tag(text: str, tag: str) -> str | None:
    """`text` behind `tag` and the space before that; all of it if something else comes first.

    None while `text` may still turn out to begin with the tag.
    """
    begin = text.lstrip()
    if begin.startswith(tag):
        return begin.removeprefix(tag)
    return None if tag.startswith(begin) else text
