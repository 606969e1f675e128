# SPDX-License-Identifier: Apache-2.0
"""Fields that requests to `/v1/responses` have in common."""

from __future__ import annotations

from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
