# SPDX-License-Identifier: Apache-2.0
"""What a configuration has decided for its user."""

from __future__ import annotations

from vllm import decisions
from vllm.config import VllmConfig


def record(config: VllmConfig, what: str) -> decisions.Decision | None:
    return next((d for d in config.decisions.decisions() if d.what == what), None)
