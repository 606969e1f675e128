# SPDX-License-Identifier: Apache-2.0
"""Reasoning between `<think>` and `</think>`."""

import enum
from typing import Any, ClassVar

from vllm.reasoning.base import ReasoningDelta, ReasoningParser
from vllm.utils.text_tags import split_held

_OPEN = "<think>"
_CLOSE = "</think>"


class _Where(enum.Enum):
    #: before the opening tag, which some templates put in the prompt and others leave to the model
    START = enum.auto()
    REASONING = enum.auto()
    CONTENT = enum.auto()


class ThinkTagParser(ReasoningParser):
    """Splits at the tags, which belong to neither side; all other text is kept as it is.

    Reasoning that is not closed lasts to the end of the reply.
    """

    tags = (_OPEN, _CLOSE)
    most_space = 4

    #: whether a reply reasons when neither the prompt nor its own first tag says so
    reasons_by_default: ClassVar[bool]

    def __init__(self, prompt: str = "", continued: str = "") -> None:
        super().__init__(prompt, continued)
        self._pending = ""
        self._where = _Where.START
        self._default = _Where.REASONING if self.reasons_by_default else _Where.CONTENT
        before = prompt.rstrip()
        if continued:
            inside = continued.rfind(_OPEN) > continued.rfind(_CLOSE)
            self._where = _Where.REASONING if inside else _Where.CONTENT
        elif before.endswith(_CLOSE):
            self._where = _Where.CONTENT
        elif before.endswith(_OPEN):
            self._default = _Where.REASONING

    def feed(self, text: str) -> ReasoningDelta:
        text = self._pending + text
        if self._where is _Where.CONTENT:
            return ReasoningDelta(content=text)
        self._pending = ""
        if self._where is _Where.REASONING and "<" not in text:
            return ReasoningDelta(text)
        if self._where is _Where.START:
            begin = text.lstrip()
            if _OPEN.startswith(begin) and begin != _OPEN:
                self._pending = text
                return ReasoningDelta()
            opened = begin.startswith(_OPEN)
            self._where = _Where.REASONING if opened else self._default
            return self.feed(begin.removeprefix(_OPEN) if opened else text)
        reasoning, closed, content = text.partition(_CLOSE)
        if closed:
            self._where = _Where.CONTENT
            return ReasoningDelta(reasoning, content)
        reasoning, self._pending = split_held(text, (_CLOSE,))
        return ReasoningDelta(reasoning)

    def finish(self) -> ReasoningDelta:
        if self._where is _Where.START:
            self._where = self._default
        rest, self._pending = self._pending, ""
        if self._where is _Where.CONTENT:
            return ReasoningDelta(content=rest)
        return ReasoningDelta(reasoning=rest)

    def may_reason(self) -> bool:
        return self._where is not _Where.CONTENT

    def with_reasoning(self, content: dict[str, Any]) -> dict[str, Any]:
        begin, end = self.bounds()
        reasoning = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
        space = {"type": "regex", "pattern": f"[ \\n]{{0,{self.most_space}}}"}
        both = {"type": "sequence", "elements": [reasoning, space, content]}
        return {"type": "or", "elements": [both, content]} if begin else both

    def bounds(self) -> tuple[str, str]:
        must = self._where is _Where.REASONING or self._default is _Where.REASONING
        return "" if must else _OPEN, _CLOSE


class DeepSeekR1ReasoningParser(ThinkTagParser):
    """DeepSeek-R1 and models distilled from it: every reply begins with reasoning, whether
    `<think>` is written or not."""

    reasons_by_default = True


class Qwen3ReasoningParser(ThinkTagParser):
    """Qwen3 and Qwen3.5: the model writes `<think>`, or the template does; with thinking switched
    off the template closes it at once, and a reply without the tag is content."""

    reasons_by_default = False
