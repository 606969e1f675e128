# SPDX-License-Identifier: Apache-2.0
"""The older import path of `LLMEngine`."""

from vllm.v1.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
