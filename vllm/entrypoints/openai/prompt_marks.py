# SPDX-License-Identifier: Apache-2.0
"""Where in a rendered conversation the prefix cache should be able to continue.

Offsets are found by rendering parts of the conversation and comparing token ids, so any chat
template will do: what a part shares with the whole is a prefix of both.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

Message = dict[str, Any]
#: (messages, add_generation_prompt) -> token ids; `VLLMValidationError` where the template refuses
Render = Callable[[list[Message], bool], list[int]]

_PREAMBLE_ROLES = ("system", "developer")
#: preambles whose token ids are remembered; long ones have a hundred thousand
_MAX_PREAMBLES = 64


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens `a` and `b` share at their start."""
    for length, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return length
    return min(len(a), len(b))


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


def message_ends(messages: list[Message], ids: list[int], render: Render) -> list[int]:
    """Offsets in `ids` after each message; those the template cannot render alone are left out."""
    ends: set[int] = set()
    for number in range(1, len(messages) + 1):
        try:
            part = render(messages[:number], False)
        except VLLMValidationError:
            continue
        ends.add(common_prefix(part, ids))
    return sorted(ends - {0})
