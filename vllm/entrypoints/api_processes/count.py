# SPDX-License-Identifier: Apache-2.0
"""How many API processes a server has."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.cli_args import AUTO

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: running requests whose streams one process serves without being busy half of the time
_REQUESTS_EACH = 256
#: cores that the engine core, its workers and the system need
_OTHER_CORES = 4
_MOST = 8


def choose_count(asked: int, vllm_config: VllmConfig, num_cores: int | None = None) -> int:
    """`asked`, or for `AUTO` a number that is recorded as a decision."""
    if asked != AUTO:
        return asked
    num_cores = num_cores or len(os.sched_getaffinity(0))
    most_requests = vllm_config.scheduler_config.max_num_seqs
    useful = math.ceil(most_requests / _REQUESTS_EACH)
    count = max(1, min(useful, num_cores - _OTHER_CORES, _MOST))
    why = (
        f"one per {_REQUESTS_EACH} of --max-num-seqs {most_requests}, on {num_cores} cores of "
        f"which the engine needs {_OTHER_CORES}"
    )
    vllm_config.decisions.record("API server processes", count, why)
    return count
