# SPDX-License-Identifier: Apache-2.0
"""What every tool parser does: text in, content and pieces of calls out."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import msgspec


def decode_string(text: str) -> str | None:
    """The string that JSON `text` stands for; None if it is none, or not encodable as UTF-8."""
    try:
        value = json.loads(text, strict=False)
        value.encode()
    except (ValueError, AttributeError):
        return None
    return str(value)


def encode_string(text: str) -> str:
    """JSON of a string, with quotes; characters outside ASCII stay readable."""
    return json.dumps(text, ensure_ascii=False)


def encode_piece(text: str) -> str:
    """A part of a string as it stands between the quotes; the encoding goes by characters."""
    return encode_string(text)[1:-1]


def parse_json(text: str) -> Any:
    """The value of strict JSON `text` (no NaN); ValueError for anything else."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


#: JSON schema of the parameters of each tool, by name
ToolSchemas = Mapping[str, Mapping[str, Any]]


class CallDelta(msgspec.Struct, frozen=True):
    """What a piece of text added to call `index`; `name` is set when the call begins with it."""

    index: int
    name: str | None
    #: appended to the JSON text of the arguments
    arguments: str
    #: the id that the model itself wrote, beside the name: its template shows it again
    call_id: str | None = None


class ToolDelta(msgspec.Struct, frozen=True):
    """What a piece of text added: content outside of calls, and at most one entry per call. `tail`:
    how many characters of the content, its last ones, came after a call had begun."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    tail: int = 0


class ReplyBuilder:
    """Collects content and calls between two deltas.

    Whitespace at the edges of the content is left out once there is a call: it belongs to the
    layout of the calls. It is kept back until that is decided.
    """

    def __init__(self, new_call_id: Callable[[], str | None] = lambda: None) -> None:
        self.num_calls = 0
        #: makes the id of a call that has none of its own; None leaves that to the API
        self.new_call_id = new_call_id
        #: whether calls after the first are reported, or left out
        self.parallel = True
        self._content = ""
        self._tail = 0
        self._space = ""
        self._spoken = False
        self._names: dict[int, str] = {}
        self._ids: dict[int, str | None] = {}
        self._known_ids: set[str] = set()
        self._arguments: dict[int, str] = {}
        #: all arguments of the current call
        self._pieces: list[str] = []
        #: calls whose arguments the end of the reply cuts, although their beginning was taken
        self._num_cut = 0
        #: the text of the call being read, as the model wrote it
        self._written: list[str] = []
        self._open = False

    def say(self, text: str) -> None:
        """Add content; a call before it that is not complete was not cut by the reply's end."""
        text = self._space + text
        if self.num_calls and not self._spoken:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        self._content += body
        if self._names:
            self._tail += len(body)
        self._spoken = self._spoken or bool(body)
        self._open = self._open and not body

    def open_call(self, opening: str) -> None:
        """What follows may be a call; `opening` is what of it was read. A call before it that is
        not complete was not cut by the reply's end."""
        self._written, self._open = [opening], False

    def wrote(self, text: str) -> None:
        """More of what may be a call, exactly as the model wrote it."""
        self._written.append(text)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Begin the next call; an id that an earlier call of the reply has is left out."""
        if call_id is None or call_id in self._known_ids:
            call_id = self.new_call_id()
        self._open = True
        self._names[self.num_calls] = name
        self._ids[self.num_calls] = call_id
        self._known_ids |= {call_id} if call_id is not None else set()
        self._arguments[self.num_calls] = ""
        self._pieces = []
        self.num_calls += 1

    def add_arguments(self, piece: str) -> None:
        """Extend the arguments of the current call."""
        index = self.num_calls - 1
        self._arguments[index] = self._arguments.get(index, "") + piece
        self._pieces.append(piece)

    def end_call(self) -> None:
        """The arguments of the current call are complete."""
        self._open = False

    def drop_cut_call(self, unread: str) -> None:
        """Make the last call content again if the reply ends within its arguments.

        A call whose beginning was taken before stays, but is not whole. `unread`: text of it not
        passed to `wrote`.
        """
        index = self.num_calls - 1
        if not self._open or _is_json("".join(self._pieces)):
            return
        if index and not self.parallel:
            return
        if index not in self._names:
            self._num_cut = 1
            return
        del self._names[index], self._ids[index], self._arguments[index]
        self.num_calls, self._open = index, False
        self.say("".join(self._written) + unread)

    @property
    def has_whole_call(self) -> bool:
        """Whether there is a call that the reply's end does not cut."""
        return self.num_calls > self._num_cut

    def end(self) -> None:
        """Nothing follows: whitespace kept back is content if there was no call."""
        if not self.num_calls:
            self._content += self._space
        self._space = ""

    def take(self) -> ToolDelta:
        """Everything since the last call of this method."""
        if not self._arguments:  # which holds an entry for every name
            content, self._content, self._tail = self._content, "", 0
            return ToolDelta(content)
        calls = tuple(
            CallDelta(index, self._names.get(index), arguments, self._ids.get(index))
            for index, arguments in self._arguments.items()
            if (arguments or index in self._names) and (self.parallel or not index)
        )
        delta = ToolDelta(self._content, calls, self._tail)
        self._content, self._tail = "", 0
        self._names, self._ids, self._arguments = {}, {}, {}
        if self._open:
            self._written = []
        return delta


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


class ToolParser(ABC):
    """Reads one reply. The result does not depend on how its text is cut into pieces.

    What looks like a call but is none stays content. Of a reply that ends within a call, the
    arguments are passed on as far as they go; `end` makes such a call content if it can. A
    subclass implements `_consume` and `_flush` and reports to `self.reply`.
    """

    #: texts that must survive detokenisation even where they are special tokens
    tags: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: ToolSchemas) -> None:
        self.tools = tools
        self.reply = ReplyBuilder(self.new_call_id)

    @staticmethod
    def new_call_id() -> str | None:
        """An id for a call that the model gave none, where its templates ask for a form of id."""
        return None

    def feed(self, text: str) -> ToolDelta:
        """Read the next piece of the reply."""
        self._consume(text)
        return self.reply.take()

    def finish(self) -> ToolDelta:
        """What was kept back, after the last piece."""
        self._flush()
        self.reply.end()
        return self.reply.take()

    def parse(self, text: str) -> ToolDelta:
        """A whole reply at once."""
        self._consume(text)
        return self.finish()

    def end(self, text: str) -> ToolDelta:
        """The last piece: as `parse`, but a call that began in this piece and whose arguments are
        not complete is content, exactly as the model wrote it."""
        self._consume(text)
        unread = self._unread()
        self._flush()
        self.reply.drop_cut_call(unread)
        self.reply.end()
        return self.reply.take()

    def _unread(self) -> str:
        """Text of an unfinished call that was kept back."""
        return ""

    @abstractmethod
    def _consume(self, text: str) -> None:
        """Report what is certain after `text`; keep the rest."""

    @abstractmethod
    def _flush(self) -> None:
        """Report the rest: the reply is over."""
