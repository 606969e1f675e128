# SPDX-License-Identifier: Apache-2.0
"""Reasoning of DeepSeek-R1 and models distilled from it."""

from vllm.reasoning.think_tags import ThinkTagParser


class DeepSeekR1ReasoningParser(ThinkTagParser):
    """Every reply begins with reasoning, whether `<think>` is written or not."""

    reasons_by_default = True
