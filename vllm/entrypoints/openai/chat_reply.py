# SPDX-License-Identifier: Apache-2.0
"""Generated text as the parts of a chat message: reasoning, content and tool calls."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.entrypoints.openai.protocol.base import refuse
from vllm.entrypoints.openai.tool_choice import ToolChoice, ToolMode
from vllm.reasoning import ReasoningParser, reasoning_parsers
from vllm.tool_parsers import CallDelta, ToolParser, tool_parsers
from vllm.tool_parsers.base import ToolDelta, ToolSchemas
from vllm.tool_parsers.json_list import JsonListParser
from vllm.tool_parsers.json_object import ObjectScanner, ScanState


class NamedCallParser(ToolParser):
    """One call of the tool `name` with the object that the reply begins with as its arguments.

    What follows the object is content, as is a reply that does not begin as one, cut off before its
    arguments for instance.
    """

    def __init__(self, tools: ToolSchemas, name: str) -> None:
        super().__init__(tools)
        self._name = name
        self._begun = False
        self._arguments = ObjectScanner()

    def _consume(self, text: str) -> None:
        if not self._begun:
            if not text.strip():
                self.reply.say(text)
                return
            self._begun = True
            if text.lstrip().startswith("{"):
                self.reply.open_call("")
                self.reply.start_call(self._name)
                text = text.lstrip()
        if not self.reply.num_calls:
            self.reply.say(text)
        elif self._arguments.state is ScanState.CLOSED:
            self.reply.say(text)
        else:
            self._read_arguments(text)

    def _read_arguments(self, text: str) -> None:
        _, read = self._arguments.feed(text)
        if self._arguments.state is ScanState.BROKEN:
            read = len(text)
        self.reply.wrote(text[:read])
        self.reply.add_arguments(text[:read])
        if self._arguments.state is ScanState.CLOSED:
            self.reply.end_call()
            self.reply.say(text[read:])

    def _flush(self) -> None:
        """Nothing is kept back."""


@dataclass(frozen=True)
class ChatParsers:
    """The server's parsers; `tool` None when the model may not decide about calls."""

    tool: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None

    @classmethod
    def from_args(cls, args: FrontEndArgs) -> ChatParsers:
        """The parsers that the flags name."""
        auto = args.enable_auto_tool_choice and args.tool_call_parser
        return cls(
            tool=tool_parsers.get(auto) if auto else None,
            reasoning=(
                reasoning_parsers.get(args.reasoning_parser) if args.reasoning_parser else None
            ),
        )

    def check(self, choice: ToolChoice) -> None:
        """Raise `VLLMValidationError` when calls could not be recognised."""
        if choice.mode is ToolMode.AUTO and self.tool is None:
            refuse(
                "tools",
                'tool_choice "auto" needs a server started with --enable-auto-tool-choice and '
                f"--tool-call-parser ({', '.join(tool_parsers.names())}); this one allows "
                'tool_choice "none" (the tools are only shown to the model), "required" or a named '
                "function",
            )

    def tags(self, choice: ToolChoice) -> set[str]:
        """Texts that the parsers of a request must see."""
        tags = set(self.reasoning.tags) if self.reasoning else set()
        if choice.mode is ToolMode.AUTO and self.tool is not None:
            tags |= set(self.tool.tags)
        return tags


class ReplyDelta(msgspec.Struct, frozen=True):
    """What a piece of generated text added to the message. `tail`: how many characters of the
    content, its last ones, came after a call had begun."""

    reasoning: str
    content: str
    calls: tuple[CallDelta, ...]
    tail: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The `delta` of a chunk, without unset keys."""
        delta: dict[str, Any] = {}
        if self.reasoning:
            delta["reasoning"] = self.reasoning
        if self.content:
            delta["content"] = self.content
        if self.calls:
            delta["tool_calls"] = [_call_chunk(call) for call in self.calls]
        return delta


class ReplySplitter:
    """Splits one reply, whole or in pieces.

    `is_constrained`: a constraint follows the reasoning; the space between them is of neither.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tool: ToolParser | None,
        include_reasoning: bool,
        is_constrained: bool = False,
    ) -> None:
        self._reasoning = reasoning
        #: characters of space that may still come before the content
        self._space = reasoning.most_space if reasoning is not None and is_constrained else 0
        self._tool = tool
        self._include_reasoning = include_reasoning

    def feed(self, text: str, finished: bool) -> ReplyDelta:
        """The next piece; `finished` with the last one."""
        reasoning, content = "", text
        if self._reasoning is not None:
            split = self._reasoning.feed(text)
            reasoning, content = split.reasoning, split.content
            if finished:
                rest = self._reasoning.finish()
                reasoning, content = reasoning + rest.reasoning, content + rest.content
            if self._space:
                content = self._without_space(content)
        found = ToolDelta(content)
        if self._tool is not None and (content or finished):
            found = self._tool.end(content) if finished else self._tool.feed(content)
        shown = reasoning if self._include_reasoning else ""
        return ReplyDelta(shown, found.content, found.calls, found.tail)

    def _without_space(self, content: str) -> str:
        begin = len(content) - len(content.lstrip(" \n"))
        dropped = min(begin, self._space)
        self._space = self._space - dropped if begin == len(content) else 0
        return content[dropped:]

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason to report: a reply with whole calls that ended by itself ended for them."""
        called = self._tool is not None and self._tool.reply.has_whole_call
        return "tool_calls" if called and reason == "stop" else reason


def make_splitter(
    parsers: ChatParsers,
    choice: ToolChoice,
    reasoning: ReasoningParser | None,
    include_reasoning: bool,
    is_constrained: bool,
) -> ReplySplitter | None:
    """The splitter for one reply, None when all of its text is content."""
    tool: ToolParser | None = None
    if choice.mode is ToolMode.AUTO and parsers.tool is not None:
        tool = parsers.tool(choice.tools)
    elif choice.mode is ToolMode.REQUIRED:
        tool = JsonListParser(choice.tools)
    elif choice.mode is ToolMode.NAMED and choice.name is not None:
        tool = NamedCallParser(choice.tools, choice.name)
    if reasoning is None and tool is None:
        return None
    if tool is not None:
        tool.reply.parallel = choice.parallel
        if parsers.tool is not None:
            tool.reply.new_call_id = parsers.tool.new_call_id
    return ReplySplitter(reasoning, tool, include_reasoning, is_constrained)


def call_object(call: CallDelta) -> dict[str, Any]:
    """A call as OpenAI's API shows it, with the model's id, or a fresh one."""
    return {
        "id": call.call_id or f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _call_chunk(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **call_object(call)}
