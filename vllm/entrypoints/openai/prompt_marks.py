# SPDX-License-Identifier: Apache-2.0
"""Where in a rendered conversation the prefix cache should be able to continue.

Offsets are found by rendering parts of the conversation and comparing token ids, so any chat
template will do: what a part shares with the whole is a prefix of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError

Message = dict[str, Any]
#: (messages, add_generation_prompt) -> token ids; `VLLMValidationError` where the template refuses
Render = Callable[[list[Message], bool], list[int]]

_PREAMBLE_ROLES = ("system", "developer")


def common_prefix(a: list[int], b: list[int]) -> int:
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
