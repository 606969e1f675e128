# SPDX-License-Identifier: Apache-2.0
"""Structured output: texts that follow a JSON schema, a regular expression or a grammar."""

from vllm.v1.structured_output.manager import StructuredOutputManager

__all__ = ["StructuredOutputManager"]
