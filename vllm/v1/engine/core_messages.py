# SPDX-License-Identifier: Apache-2.0
"""What a front end and the process of its engine core tell each other at the start.

This module imports nothing heavy: a front end needs none of the core's own modules.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm import decisions
from vllm.utils.phase_ledger import PhaseEvent

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor


@dataclass(frozen=True)
class CoreSetup:
    """What a core starts from; without an `executor_class` the configuration decides."""

    vllm_config: VllmConfig
    executor_class: type[Executor] | None
    log_stats: bool


@dataclass(frozen=True)
class CoreAddresses:
    """ZMQ addresses of one client, which binds both. The client that started the core has the index
    0; it attaches further ones, and detaches those that are gone."""

    requests: str
    outputs: str

    @property
    def directory(self) -> str:
        """Of both sockets."""
        return os.path.dirname(self.requests.removeprefix("ipc://"))


@dataclass(frozen=True)
class CoreReady:
    """Sent once when the core can take requests: what start-up decided."""

    num_gpu_blocks: int | None
    capacity_tokens: int | None
    max_model_len: int
    decisions: list[decisions.Decision]
    phases: list[PhaseEvent]
