# SPDX-License-Identifier: Apache-2.0
"""Reasoning of Qwen3 and Qwen3.5."""

from vllm.reasoning.think_tags import ThinkTagParser


class Qwen3ReasoningParser(ThinkTagParser):
    """The model writes `<think>`, or the template does; with thinking switched off the template
    closes it at once, and a reply without the tag is content."""

    reasons_by_default = False
