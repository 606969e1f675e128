# SPDX-License-Identifier: Apache-2.0
"""Reasoning in the channel `analysis` of the harmony format: gpt-oss."""

from typing import Any

from vllm.reasoning.base import ReasoningDelta, ReasoningParser
from vllm.utils.harmony import CHANNEL, ENDS, MESSAGE, START, TAGS, HarmonyReader, MessagePiece

_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_FINAL = f"{CHANNEL}final{MESSAGE}"


class HarmonyReasoningParser(ReasoningParser):
    """Messages of other channels are content, one line after another, without their markup; those
    to a recipient keep it, for the tool parser `harmony`."""

    tags = TAGS

    def __init__(self, prompt: str = "", continued: str = "") -> None:
        super().__init__(prompt, continued)
        self._reader = HarmonyReader()
        #: of both sides, whether a message with text came, which the next begins a line after
        self._spoken = {"reasoning": False, "content": False}
        self._new = {"reasoning": False, "content": False}

    def feed(self, text: str) -> ReasoningDelta:
        return self._told(self._reader.feed(text))

    def finish(self) -> ReasoningDelta:
        return self._told(self._reader.finish())

    def _told(self, pieces: list[MessagePiece]) -> ReasoningDelta:
        told = {"reasoning": "", "content": ""}
        for piece in pieces:
            if piece.recipient is not None:
                told["content"] += piece.header + piece.text + piece.end
                continue
            side = "reasoning" if piece.channel == "analysis" else "content"
            self._new[side] = self._new[side] or bool(piece.header)
            if piece.text:
                if self._new[side] and self._spoken[side]:
                    told[side] += "\n"
                told[side] += piece.text
                self._spoken[side], self._new[side] = True, False
        return ReasoningDelta(**told)

    def may_reason(self) -> bool:
        return not (self.continued or self.prompt.rstrip().endswith(_FINAL))

    def with_reasoning(self, content: dict[str, Any]) -> dict[str, Any]:
        analysis = {
            "type": "tag",
            "begin": _ANALYSIS,
            "content": {"type": "any_text"},
            "end": ENDS[0],
        }
        answers = [
            {"type": "sequence", "elements": [{"type": "const_string", "value": value}, content]}
            for value in (f"{START}assistant{_FINAL}", _FINAL)
        ]
        return {
            "type": "or",
            "elements": [{"type": "sequence", "elements": [analysis, answers[0]]}, answers[1]],
        }
