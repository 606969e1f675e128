# SPDX-License-Identifier: Apache-2.0
"""Calls as nested tags with plain-text values: Qwen3-Coder, Qwen3.5."""

from collections.abc import Mapping
from typing import Any

from vllm.tool_parsers.base import ToolSchemas, encode_piece, encode_string, parse_json
from vllm.tool_parsers.stepwise import StepwiseParser
from vllm.utils.text_tags import find_first, skip_tag, split_held

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_FUNCTION = "<function="
_END_FUNCTION = "</function>"
_PARAMETER = "<parameter="
_END_PARAMETER = "</parameter>"

#: longer "names" are text that only looks like a tag
_MAX_NAME = 256


class Qwen3CoderToolParser(StepwiseParser):
    r"""`<tool_call>\n<function=f>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>`.

    The tool's schema says how a value becomes JSON: see `ParameterValue`. The outer tags and
    closing tags may be missing, as models forget them.
    """

    tags = (OPEN, CLOSE)
    openings = (OPEN, _FUNCTION)

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        #: opening tags so far, content again if no call follows
        self._raw = ""
        self._function = ""
        self._num_parameters = 0
        self._value = ParameterValue(frozenset())

    def _opened(self, tag: str) -> None:
        self._raw = tag
        self.reply.open_call(tag)
        self._read = self._read_opened if tag == OPEN else self._read_function_name

    def _read_opened(self) -> bool:
        """Between the two opening tags."""
        rest = skip_tag(self._pending, _FUNCTION)
        if rest is None:
            return False
        if rest == self._pending:
            return self._refuse()
        self._raw += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        self._read = self._read_function_name
        return True

    def _refuse(self) -> bool:
        """No call after all."""
        self.reply.say(self._raw)
        self._read = self._read_content
        return True

    def _read_function_name(self) -> bool:
        name, end, rest = self._pending.partition(">")
        if len(name) > _MAX_NAME or "<" in name or "\n" in name or (end and not name.strip()):
            return self._refuse()
        if not end:
            return False
        self._function = name.strip()
        self.reply.start_call(self._function)
        self.reply.add_arguments("{")
        self._num_parameters = 0
        self._pending = rest
        self._read = self._read_function
        return True

    def _read_function(self) -> bool:
        """Between parameters, where only tags count."""
        ends = (_PARAMETER, _END_FUNCTION, CLOSE)
        found = find_first(self._pending, ends)
        if found is None:
            _, self._pending = split_held(self._pending, ends)
            return False
        at, tag = found
        if tag == _PARAMETER:
            self._read = self._read_parameter_name
            self._pending = self._pending[at + len(tag) :]
        else:
            self.reply.add_arguments("}")
            self.reply.end_call()
            self._read = self._read_behind_function
            self._pending = self._pending[at:].removeprefix(_END_FUNCTION)
        return True

    def _read_parameter_name(self) -> bool:
        name, end, rest = self._pending.partition(">")
        if not end:
            return False
        name = name.strip()
        comma = ", " if self._num_parameters else ""
        self.reply.add_arguments(f"{comma}{encode_string(name)}: ")
        self._num_parameters += 1
        self._value = ParameterValue(parameter_types(self.tools.get(self._function, {}), name))
        self._pending = rest
        self._read = self._read_value
        return True

    def _read_value(self) -> bool:
        ends = (_END_PARAMETER, _PARAMETER, _END_FUNCTION)
        found = find_first(self._pending, ends)
        if found is None:
            text, self._pending = split_held(self._pending, ends)
            self.reply.add_arguments(self._value.feed(text))
            return False
        at, _ = found
        self.reply.add_arguments(self._value.feed(self._pending[:at]) + self._value.finish())
        self._pending = self._pending[at:].removeprefix(_END_PARAMETER)
        self._read = self._read_function
        return True

    def _read_behind_function(self) -> bool:
        return self._close(CLOSE)

    def _step(self) -> bool:
        outside, before = self._read == self._read_content, self._pending
        goes_on = super()._step()
        if not outside:
            self.reply.wrote(before[: len(before) - len(self._pending)])
        return goes_on

    def _unread(self) -> str:
        return self._pending

    def _flush(self) -> None:
        if self._read == self._read_content:
            self.reply.say(self._pending)
        elif self._read in (self._read_opened, self._read_function_name):
            self.reply.say(self._raw + self._pending)
        elif self._read == self._read_value:
            self.reply.add_arguments(self._value.feed(self._pending))


class ParameterValue:
    """Text to JSON, piece by piece for strings and at the end for anything else.

    One line break at each end belongs to the layout. If the schema allows only strings, the text
    is one. Otherwise text that is JSON of an allowed type goes out as written (`True`, `None` and
    the like in lower case, as JSON spells them), and anything else as a string.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._streams = types <= {"string"}
        self._begun = False
        self._trailing = ""
        self._text = ""

    def feed(self, text: str) -> str:
        """The JSON that became certain with `text`."""
        text = self._trailing + text
        if not text:
            return ""
        opening = ""
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
            opening = '"' if self._streams else ""
        self._trailing = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._streams:
            return opening + encode_piece(text)
        self._text += text
        return ""

    def finish(self) -> str:
        """The rest, when the value is complete."""
        if self._streams:
            return '"' if self._begun else '""'
        written = self._text.strip()
        if written.lower() in ("true", "false", "null", "none"):
            written = "null" if written.lower() == "none" else written.lower()
        try:
            kind = json_type(parse_json(written))
        except ValueError:
            kind = "string"
        if kind != "string" and kind in self._types:
            return written
        return encode_string(self._text)


#: nesting of references and alternatives that is followed; recursive schemas exist
_MAX_DEPTH = 16

#: every type, for a schema that says nothing
ANY_TYPE = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


def json_type(value: Any) -> str:
    """The JSON type of a parsed value; whole numbers are `integer`, also as 2.0."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def parameter_types(schema: Mapping[str, Any], parameter: str) -> frozenset[str]:
    """The types that the object schema `schema` allows for `parameter`.

    A parameter it does not declare is a string.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or parameter not in properties:
        return frozenset({"string"})
    return _types(properties[parameter], schema, 0)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ANY_TYPE
    allowed = ANY_TYPE
    if isinstance(reference := schema.get("$ref"), str):
        allowed &= _types(_resolve(reference, root), root, depth + 1)
    if "type" in schema:
        named = schema["type"]
        names = frozenset(
            name
            for name in (named if isinstance(named, list) else [named])
            if isinstance(name, str)
        )
        allowed &= names | ({"integer"} if "number" in names else frozenset())
    if isinstance(values := schema.get("enum"), list):
        allowed &= frozenset(map(json_type, values))
    if "const" in schema:
        allowed &= {json_type(schema["const"])}
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            allowed &= frozenset().union(*(_types(one, root, depth + 1) for one in options))
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            allowed &= _types(part, root, depth + 1)
    return allowed


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of a local reference; None, which allows anything, if it is missing."""
    target: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target
