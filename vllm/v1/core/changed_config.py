# SPDX-License-Identifier: Apache-2.0
"""A configuration with something changed, as an engine would resolve it: for what is asked only."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.resolve import resolve


def with_changes(
    config: VllmConfig,
    cache: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
) -> VllmConfig:
    """The configuration with these fields of its cache or parallel configuration; ValueError if
    that is refused. The original, its decisions and the log are left alone."""
    changed = copy.copy(config)
    changed.decisions = copy.deepcopy(config.decisions)
    changed.decisions.is_logged = False
    changed.cache_config = replace(config.cache_config, **(cache or {}))
    changed.parallel_config = replace(config.parallel_config, **(parallel or {}))
    changed.scheduler_config = copy.copy(config.scheduler_config)
    changed.compilation_config = copy.copy(config.compilation_config)
    return resolve(changed)
