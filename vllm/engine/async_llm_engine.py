# SPDX-License-Identifier: Apache-2.0
"""The older name and import path of `AsyncLLM`."""

from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
