# SPDX-License-Identifier: Apache-2.0
"""`tools` and `tool_choice`: what the model may call, and how it is made to."""

import enum
import json
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.protocol.base import refuse
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.json_schema import HOLDS_NAMED

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
#: their values are data, not schemas
_DATA_KEYWORDS = frozenset({"const", "default", "enum", "examples"})


class ToolMode(enum.Enum):
    """Who decides whether a tool is called."""

    #: nobody: text only
    NONE = "none"
    #: the model
    AUTO = "auto"
    #: the request; the model picks which tools
    REQUIRED = "required"
    #: the request, down to the tool
    NAMED = "named"


@dataclass(frozen=True)
class ToolChoice:
    """The tools of a request (parameter schemas by name) and who decides about them."""

    mode: ToolMode
    tools: dict[str, dict[str, Any]]
    #: the tool of mode NAMED
    name: str | None = None
    parallel: bool = True

    def constraint(self) -> StructuredOutputsParams | None:
        """The JSON that the reply must be, if the request forces calls."""
        if self.mode is ToolMode.NAMED and self.name is not None:
            schema = self.tools[self.name]
        elif self.mode is ToolMode.REQUIRED:
            schema = call_list_schema(self.tools, self.parallel)
        else:
            return None
        # As text it reaches the engine's process whatever numbers it contains. Without free
        # whitespace, of which a model may write as much as fits instead of the call.
        return StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)


def resolve_tool_choice(request: ChatCompletionRequest) -> ToolChoice:
    """The request's choice; raises `VLLMValidationError` naming what is wrong with it."""
    tools = _tool_schemas(request.tools or [])
    parallel = request.parallel_tool_calls is not False
    choice = request.tool_choice
    if choice is None:
        choice = "auto"
    if choice in ("none", "auto"):
        mode = ToolMode(choice) if tools else ToolMode.NONE
        return ToolChoice(mode, tools, parallel=parallel)
    name = None if choice == "required" else _named(choice)
    if not tools:
        refuse("tool_choice", "this tool_choice needs tools; add them or leave tool_choice out")
    if name is not None and name not in tools:
        refuse("tool_choice", f"there is no tool {name!r}; the tools are {', '.join(tools)}")
    for field in ("response_format", "structured_outputs"):
        value = getattr(request, field)
        if value and value.get("type") != "text":
            refuse(field, f'{field} cannot be combined with a forced call; use tool_choice "auto"')
    mode = ToolMode.REQUIRED if name is None else ToolMode.NAMED
    return ToolChoice(mode, tools, name, parallel)


def _named(choice: Any) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`."""
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or choice.get("type", "function") != "function":
        function = {}
    name = function.get("name")
    if not isinstance(name, str):
        refuse(
            "tool_choice",
            f'tool_choice {choice!r} is not supported; use "none", "auto", "required" or '
            '{"type": "function", "function": {"name": "..."}}',
        )
    return name


def _tool_schemas(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if tool.get("type", "function") != "function":
            refuse(f"{where}.type", f'tool type {tool["type"]!r} is not supported; use "function"')
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            refuse(f"{where}.function", f"{where} needs a function with a name")
        if name in schemas:
            refuse(f"{where}.function.name", f"two tools are named {name!r}")
        parameters = function.get("parameters") or _NO_PARAMETERS
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            refuse(
                f"{where}.function.parameters",
                'parameters must be a JSON schema of an object ({"type": "object", ...})',
            )
        schemas[name] = parameters
    return schemas


def call_list_schema(tools: dict[str, dict[str, Any]], parallel: bool) -> dict[str, Any]:
    """JSON schema of a list of calls, at least one, and only one unless `parallel`.

    Each tool's schema becomes a definition, with its own references pointing there.
    """
    calls, definitions = [], {}
    for index, (name, parameters) in enumerate(tools.items()):
        key = f"tool{index}"
        definitions[key] = _moved(parameters, f"#/$defs/{key}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [name]},
                    "parameters": {"$ref": f"#/$defs/{key}"},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    limit = {} if parallel else {"maxItems": 1}
    return {
        "type": "array",
        "minItems": 1,
        **limit,
        "items": {"anyOf": calls},
        "$defs": definitions,
    }


def _moved(schema: Any, root: str) -> Any:
    """`schema` with local references changed for its new place `root`."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key in HOLDS_NAMED and isinstance(value, dict):
            moved[key] = {name: _moved(part, root) for name, part in value.items()}
        else:
            moved[key] = value if key in _DATA_KEYWORDS else _moved(value, root)
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
