# SPDX-License-Identifier: Apache-2.0
"""When experts move: after every so many steps, which replicas that share experts count alike."""

from __future__ import annotations

from vllm.config import ParallelConfig
from vllm.logger import init_logger
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.expert_metrics import mean_balancedness

logger = init_logger(__name__)


class ExpertRearrangement:
    """What an engine core does about its workers' experts between two steps."""

    def __init__(self, config: ParallelConfig, executor: Executor) -> None:
        self._executor = executor
        self._enabled = config.enable_eplb
        self._interval = config.eplb_config.step_interval
        self._window = config.eplb_config.window_size
        self._logs = config.eplb_config.log_balancedness and config.data_parallel_rank == 0
        self._steps = 0
        self.is_due = False

    def count_step(self) -> None:
        """A step was launched, of all replicas that share experts."""
        self._steps += 1
        to_next = -self._steps % self._interval
        self.is_due = self._enabled and to_next in (0, self._window % self._interval)

    def run(self) -> None:
        """Do what is due after the step that was counted last. Another replica may wait for it, so
        it is done before this one waits for others."""
        if not self.is_due:
            return
        self.is_due = False
        to_next = -self._steps % self._interval
        if to_next == 0:
            self._rearrange()
        if to_next == self._window % self._interval:
            self._executor.collective_rpc("begin_expert_window")

    def _rearrange(self) -> None:
        ranks = self._executor.collective_rpc("rearrange_experts")
        if self._logs and (found := mean_balancedness(ranks)) is not None:
            logger.info("experts rearranged: balancedness %.3f before, %.3f after", *found)
