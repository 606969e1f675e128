# SPDX-License-Identifier: Apache-2.0
"""Tool calls in generated text: one parser per model format, found by name."""

from vllm.tool_parsers.base import CallDelta, ToolDelta, ToolParser, ToolSchemas
from vllm.utils.class_registry import ClassRegistry

__all__ = ["CallDelta", "ToolDelta", "ToolParser", "ToolSchemas", "tool_parsers"]

#: the values of --tool-call-parser
tool_parsers: ClassRegistry[ToolParser] = ClassRegistry("tool call parser", ToolParser)  # type: ignore[type-abstract]

tool_parsers.register("harmony", "vllm.tool_parsers.harmony.HarmonyToolParser")
tool_parsers.register("hermes", "vllm.tool_parsers.hermes.HermesToolParser")
tool_parsers.register("kimi_k2", "vllm.tool_parsers.kimi_k2.KimiK2ToolParser")
tool_parsers.register("llama3_json", "vllm.tool_parsers.llama3_json.Llama3JsonToolParser")
tool_parsers.register("mistral", "vllm.tool_parsers.mistral.MistralToolParser")
tool_parsers.register("nemotron_json", "vllm.tool_parsers.nemotron_json.NemotronJsonToolParser")
tool_parsers.register("olmo3", "vllm.tool_parsers.olmo3.Olmo3ToolParser")
tool_parsers.register("pythonic", "vllm.tool_parsers.pythonic.PythonicToolParser")
tool_parsers.register("qwen3_coder", "vllm.tool_parsers.qwen3_coder.Qwen3CoderToolParser")
