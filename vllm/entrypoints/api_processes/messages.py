# SPDX-License-Identifier: Apache-2.0
"""What a supervisor tells an API process at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.entrypoints.openai.cli_args import FrontEndArgs
    from vllm.v1.engine.core_client import RunningCore


@dataclass(frozen=True)
class ApiSetup:
    """`place`: the process's number among those that serve at the same time, from 0; whoever
    replaces it has the same. `client_index`: its number among all clients the core ever has."""

    vllm_config: VllmConfig
    args: FrontEndArgs
    log_stats: bool
    place: int
    num_places: int
    client_index: int
    #: one per replica
    cores: tuple[RunningCore, ...]
    tally_path: str
    #: where the processes share what they know of several replicas
    board_path: str | None
    #: level at which the cores sleep, 0 if they are awake
    sleep_level: int = 0
