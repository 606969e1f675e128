# SPDX-License-Identifier: Apache-2.0
"""Where in a rendered conversation the prefix cache should be able to continue.

Offsets are found by rendering parts of the conversation and comparing text or token ids, so any
chat template will do: what a part shares with the whole is a prefix of both.
"""

import hashlib
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

Message = dict[str, Any]
#: (messages, add_generation_prompt) -> token ids; `VLLMValidationError` where the template refuses
Render = Callable[[list[Message], bool], list[int]]
#: the same in text
RenderText = Callable[[list[Message], bool], str]

_PREAMBLE_ROLES = ("system", "developer")
#: preambles whose token ids are remembered; long ones have a hundred thousand
_MAX_PREAMBLES = 64


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens `a` and `b` share at their start."""
    for length, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return length
    return min(len(a), len(b))


def common_characters(a: str, b: str) -> int:
    """Characters `a` and `b` share at their start."""
    if b.startswith(a):
        return len(a)
    shared, differs = 0, min(len(a), len(b)) + 1
    while differs - shared > 1:
        middle = (shared + differs) // 2
        if a[shared:middle] == b[shared:middle]:
            shared = middle
        else:
            differs = middle
    return shared


def preamble_of(messages: list[Message]) -> list[Message]:
    """The system messages before anything else."""
    for number, message in enumerate(messages):
        if message.get("role") not in _PREAMBLE_ROLES:
            return messages[:number]
    return messages


def preamble_ids(preamble: list[Message], render: Render) -> list[int]:
    """Token ids that every conversation with this preamble (and these tools) starts with.

    Some templates refuse a conversation without a user's message, so two are rendered that differ
    in nothing but that; nothing is found where the template refuses those too.
    """
    try:
        one, other = (
            render([*preamble, {"role": "user", "content": text}], False) for text in ("a", "b")
        )
    except VLLMValidationError:
        return []
    return one[: common_prefix(one, other)]


class Preambles:
    """Remembers the latest preambles' token ids; shared by the tokenizer threads."""

    def __init__(self, max_size: int = _MAX_PREAMBLES) -> None:
        self._max_size = max_size
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def end_in(self, ids: list[int], preamble: list[Message], key: str, render: Render) -> int:
        """How many tokens of a conversation's `ids` are its preamble; `key` is equal for all
        conversations that begin in the same way."""
        digest = hashlib.sha256(key.encode()).digest()
        with self._lock:
            found = self._known.get(digest)
        if found is None:
            found = array("I", preamble_ids(preamble, render))
        with self._lock:
            self._known[digest] = found
            self._known.move_to_end(digest)
            if len(self._known) > self._max_size:
                self._known.popitem(last=False)
        return common_prefix(found, ids)


def message_ends(
    parts: Iterable[list[Message]], text: str, render: RenderText, token_ends: Sequence[int]
) -> list[int]:
    """Token counts at the ends of `parts`, each the first messages of the conversation `text`;
    parts the template cannot render alone are left out.

    `token_ends`: the characters of `text` up to the end of each of its tokens, ascending. A token
    that reaches beyond the part does not count.
    """
    ends: set[int] = set()
    for part in parts:
        try:
            shared = common_characters(render(part, False), text)
        except VLLMValidationError:
            continue
        ends.add(bisect_right(token_ends, shared))
    return sorted(ends - {0})
