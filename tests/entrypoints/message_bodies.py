# SPDX-License-Identifier: Apache-2.0
"""What requests to `/v1/messages` hold: a message, a tool, and asking for reasoning."""

from __future__ import annotations

from typing import Any

HI: Any = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL: Any = {"name": "weather", "description": "In a city.", "input_schema": SCHEMA}
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
