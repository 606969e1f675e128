# SPDX-License-Identifier: Apache-2.0
"""Parsers by name, and a parser of one's own in one file."""

import re
from pathlib import Path

import pytest

from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.exceptions import VLLMValidationError
from vllm.tool_parsers import ToolParser, tool_parsers
from vllm.utils.class_registry import ClassRegistry

GUIDE = Path(__file__).parents[2] / "docs" / "tools_and_reasoning.md"


def test_names() -> None:
    assert {"hermes", "qwen3_coder"} <= set(tool_parsers.names())
    with pytest.raises(VLLMValidationError, match="'llama9'; available: .*hermes, .*qwen3_coder"):
        tool_parsers.get("llama9")


def test_registration() -> None:
    registry: ClassRegistry[ToolParser] = ClassRegistry("parser", ToolParser)  # type: ignore[type-abstract]
    registry.register("h", "vllm.tool_parsers.hermes.HermesToolParser")
    registry.register("h", "vllm.tool_parsers.hermes.HermesToolParser")
    with pytest.raises(ValueError, match="already registered"):
        registry.register("h", "somewhere.Else")
    assert registry.get("h") is registry.get("h") is tool_parsers.get("hermes")
    registry.register("text", "pathlib.Path")
    with pytest.raises(TypeError, match="no ToolParser"):
        registry.get("text")


def test_the_guide_makes_a_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_parsers, "_entries", dict(tool_parsers._entries))
    code = re.search(r"```python\n(# my_parser.py.*?)```", GUIDE.read_text(), re.DOTALL)
    assert code is not None
    plugin = tmp_path / "my_parser.py"
    plugin.write_text(code.group(1))
    for _ in range(2):
        FrontEndArgs(
            tool_parser_plugin=str(plugin), tool_call_parser="line", enable_auto_tool_choice=True
        )
    delta = tool_parsers.get("line")({}).parse('Hm.\n!f {"a": 1}\n')
    assert delta.content == "Hm."
    assert [(call.name, call.arguments) for call in delta.calls] == [("f", '{"a": 1}')]


def test_plugins_that_fail(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(VLLMValidationError, match="--reasoning-parser-plugin.*division by zero"):
        FrontEndArgs(reasoning_parser_plugin=str(broken))
    with pytest.raises(VLLMValidationError, match="--tool-parser-plugin.*not a readable"):
        FrontEndArgs(tool_parser_plugin=str(tmp_path))
