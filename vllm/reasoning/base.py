# SPDX-License-Identifier: Apache-2.0
"""What every reasoning parser does: text in, reasoning and content out."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True):
    """What a piece of text added; the reasoning of a reply comes before its content."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(ABC):
    """Reads one reply. The result does not depend on how its text is cut into pieces.

    `prompt` is the text before the reply, because templates may open or close the reasoning there.
    `continued` is the beginning of the message when the reply continues one, else empty.
    """

    #: texts that must survive detokenisation even where they are special tokens
    tags: ClassVar[tuple[str, ...]] = ()
    #: blanks and line ends that `with_reasoning` lets the model write before the content, at most
    most_space: ClassVar[int] = 0

    def __init__(self, prompt: str = "", continued: str = "") -> None:
        self.prompt = prompt
        self.continued = continued

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta:
        """Read the next piece of the reply."""

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """What was kept back, after the last piece."""

    @abstractmethod
    def may_reason(self) -> bool:
        """Before the first piece: whether reasoning may come before the content."""

    @abstractmethod
    def with_reasoning(self, content: dict[str, Any]) -> dict[str, Any]:
        """A structural-tag format: reasoning in free text, then what the format `content` allows.

        The vocabulary of formats is xgrammar's (`type`: sequence, or, tag, any_text, ...).
        """

    def bounds(self) -> tuple[str, str] | None:
        """Before the first piece: the texts that open (empty if it is open) and close reasoning.

        None where no text closes it; then it cannot be bounded.
        """
        return None

    def parse(self, text: str) -> ReasoningDelta:
        """A whole reply at once."""
        first, rest = self.feed(text), self.finish()
        return ReasoningDelta(first.reasoning + rest.reasoning, first.content + rest.content)
