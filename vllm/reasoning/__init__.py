# SPDX-License-Identifier: Apache-2.0
"""Reasoning in generated text: one parser per model format, found by name."""

from vllm.reasoning.base import ReasoningDelta, ReasoningParser
from vllm.utils.class_registry import ClassRegistry

__all__ = ["ReasoningDelta", "ReasoningParser", "reasoning_parsers"]

#: the values of --reasoning-parser
reasoning_parsers: ClassRegistry[ReasoningParser] = ClassRegistry(
    "reasoning parser",
    ReasoningParser,  # type: ignore[type-abstract]
)

reasoning_parsers.register("deepseek_r1", "vllm.reasoning.think_tags.DeepSeekR1ReasoningParser")
reasoning_parsers.register("harmony", "vllm.reasoning.harmony.HarmonyReasoningParser")
# Nemotron 3 reasons unless the template has closed the reasoning in the prompt.
reasoning_parsers.register("nemotron_v3", "vllm.reasoning.think_tags.DeepSeekR1ReasoningParser")
reasoning_parsers.register("qwen3", "vllm.reasoning.think_tags.Qwen3ReasoningParser")
