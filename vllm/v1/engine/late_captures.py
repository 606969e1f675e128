# SPDX-License-Identifier: Apache-2.0
"""Graph captures that `--ready-in` left for later: made while the engine is idle, and now and then
while it is not."""

from __future__ import annotations

import time

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.executor.abstract import Executor

logger = init_logger(__name__)

#: seconds between captures under load: each delays the requests of one step by some 0.1 s
_BUSY_INTERVAL_S = 1.0


class LateCaptures:
    """Captures one size at a time on every worker until none is left."""

    def __init__(self, vllm_config: VllmConfig, executor: Executor) -> None:
        self._vllm_config, self._executor = vllm_config, executor
        self.recount()

    def recount(self) -> None:
        """The workers have other graphs to capture than before."""
        self._num_left = 0
        if self._vllm_config.compilation_config.ready_by_s is not None:
            self._num_left = max(self._executor.collective_rpc("num_pending_graphs"))
        self._last_s = time.monotonic()

    @property
    def pending(self) -> bool:
        return self._num_left > 0

    def capture_one(self) -> None:
        """Capture a size now; steps queued before it run first."""
        self._num_left = max(self._executor.collective_rpc("capture_next_graph"))
        self._last_s = time.monotonic()
        if not self._num_left:
            logger.info("all graphs are captured")

    @property
    def is_due(self) -> bool:
        """Whether to capture a size under load, too: the last one is a while ago."""
        return self.pending and time.monotonic() - self._last_s >= _BUSY_INTERVAL_S
