# SPDX-License-Identifier: Apache-2.0
"""`tools` and `tool_choice`: what the model may call, and how it is made to."""

import enum
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.protocol.base import refuse
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.json_schema import HOLDS_NAMED

Tools = list[dict[str, Any]]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_NO_OTHER_CONSTRAINT = '{} cannot be combined with a forced call; use tool_choice "auto"'
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

    @property
    def forces_calls(self) -> bool:
        """Whether the request decides that there is a call."""
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)

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
    """The request's choice among its tools, of which `only_allowed` has left the allowed ones;
    raises `VLLMValidationError` naming what is wrong with it."""
    parallel = request.parallel_tool_calls is not False
    choice = choose_tools(request.tools, request.tool_choice, parallel)
    for field in ("response_format", "structured_outputs") if choice.forces_calls else ():
        value = getattr(request, field)
        if value and value.get("type") != "text":
            refuse(field, _NO_OTHER_CONSTRAINT.format(field))
    return choice


def choose_tools(tools: Tools | None, choice: Any, parallel: bool = True) -> ToolChoice:
    """What `tools` and `tool_choice` in the chat API's form mean; raises `VLLMValidationError`
    naming what is wrong with them."""
    schemas = _tool_schemas(tools or [])
    if choice is None:
        choice = "auto"
    if choice in ("none", "auto"):
        mode = ToolMode(choice) if schemas else ToolMode.NONE
        return ToolChoice(mode, schemas, parallel=parallel)
    name = None if choice == "required" else _named(choice)
    if not schemas:
        refuse("tool_choice", "this tool_choice needs tools; add them or leave tool_choice out")
    if name is not None and name not in schemas:
        refuse("tool_choice", f"there is no tool {name!r}; the tools are {', '.join(schemas)}")
    mode = ToolMode.REQUIRED if name is None else ToolMode.NAMED
    return ToolChoice(mode, schemas, name, parallel)


def only_allowed(tools: Tools | None, choice: Any) -> tuple[Tools | None, Any]:
    """`tools` and `tool_choice` that mean the same without `{"type": "allowed_tools",
    "allowed_tools": {"mode": ..., "tools": [...]}}`."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    where = "tool_choice.allowed_tools"
    given = choice.get("allowed_tools")
    if not isinstance(given, dict):
        refuse(where, "must be an object with a mode and the allowed tools")
    return tools_allowed_by(where, tools or [], given, _function_name)


def tools_allowed_by(
    where: str, tools: Tools, given: dict[str, Any], name_of: Callable[[dict[str, Any]], Any]
) -> tuple[Tools | None, str]:
    """The `tools` that `given`, an object with the keys `mode` and `tools` which errors call
    `where`, lets the model see, and the `tool_choice` among them. `name_of`: of one that it lists.
    """
    known = _tool_schemas(tools)
    mode, listed = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        refuse(f"{where}.mode", f'{mode!r} is not "auto" or "required"')
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        refuse(f"{where}.tools", "must list the allowed tools")
    names = [name_of(one) for one in listed]
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in known:
            refuse(f"{where}.tools.{index}", f"there is no tool {name!r} in the request's tools")
    return [tool for tool in tools if _function_name(tool) in names] or None, mode


def with_forced_calls(
    params: SamplingParams | Sequence[SamplingParams], choice: ToolChoice
) -> SamplingParams | list[SamplingParams]:
    """`params`, or copies that make the model call what `choice` forces; raises
    `VLLMValidationError` for params that constrain the reply otherwise."""
    if not isinstance(params, SamplingParams):
        return [_constrained(one, choice) for one in params]
    return _constrained(params, choice)


def _constrained(params: SamplingParams, choice: ToolChoice) -> SamplingParams:
    constraint = choice.constraint()
    if constraint is None:
        return params
    if params.structured_outputs is not None:
        refuse("structured_outputs", _NO_OTHER_CONSTRAINT.format("structured_outputs"))
    params = params.clone()
    params.structured_outputs = constraint
    return params


def _named(choice: Any) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`."""
    name = _function_name(choice) if isinstance(choice, dict) else None
    if not isinstance(name, str):
        refuse(
            "tool_choice",
            f'tool_choice {choice!r} is not supported; use "none", "auto", "required", '
            '{"type": "function", "function": {"name": "..."}} or {"type": "allowed_tools", '
            '"allowed_tools": {"mode": "...", "tools": [...]}}',
        )
    return name


def _function_name(tool: dict[str, Any]) -> Any:
    """The name in `{"type": "function", "function": {"name": ...}}`, None without one."""
    function = tool.get("function")
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        return None
    return function.get("name")


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
