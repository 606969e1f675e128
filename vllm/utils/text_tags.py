# SPDX-License-Identifier: Apache-2.0
"""Finding tags in text that arrives in pieces."""

import functools
from collections.abc import Sequence


def find_first(text: str, tags: Sequence[str]) -> tuple[int, str] | None:
    """Position and name of the tag that occurs first in `text`; None without any."""
    found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
    return min(found, default=None)


@functools.lru_cache(maxsize=256)
def _beginnings(tags: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """The first characters of all tags, and the length of the longest unfinished tag."""
    return frozenset(tag[0] for tag in tags), max(map(len, tags)) - 1


def num_held(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a tag."""
    firsts, longest = _beginnings(tuple(tags))
    tail = text[-longest:]
    if firsts.isdisjoint(tail):
        return 0
    for at, char in enumerate(tail):
        if char in firsts:
            end = tail[at:]
            if any(tag.startswith(end) for tag in tags if len(tag) > len(end)):
                return len(end)
    return 0


def split_held(text: str, tags: Sequence[str]) -> tuple[str, str]:
    """`text` without, and only, the characters that could begin a tag."""
    held = num_held(text, tags)
    if not held:
        return text, ""
    cut = len(text) - held
    return text[:cut], text[cut:]


def skip_tag(text: str, tag: str) -> str | None:
    """`text` behind `tag` and the space before that; all of it if something else comes first.

    None while `text` may still turn out to begin with the tag.
    """
    begin = text.lstrip()
    if begin.startswith(tag):
        return begin.removeprefix(tag)
    return None if tag.startswith(begin) else text
