# SPDX-License-Identifier: Apache-2.0
"""One worker in the engine core's own process.

Steps are launched on one thread and their results awaited on another, so the core schedules step
n + 1 while step n runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.structured_output.mask_words import FilledMasks
from vllm.v1.structured_output.masks import MaskQueue
from vllm.v1.worker.worker import Worker


class UniProcExecutor(Executor):
    """Runs the worker on a thread of this process."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="launch")
        self._collector = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self._closed = False
        self._masks = MaskQueue()
        self.worker = Worker(vllm_config, receive_masks=self._masks.receive)
        # Device state (current device, stream, thread counts) belongs to the launching thread.
        for start in (self.worker.init_device, self.worker.load_model):
            self._launcher.submit(start).result()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        launched = self._launcher.submit(self.worker.execute_model, scheduler_output)
        return self._collector.submit(_collect, launched)

    def init_kv_output_aggregator(self, connector: KVConnectorBase_V1) -> None:
        """One worker's reports need no merging."""

    def send_token_masks(self, masks: FilledMasks) -> None:
        self._masks.send(masks)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        call = self._launcher.submit(self.worker.call, method, args, kwargs or {})
        return [call.result(timeout)]

    def check_health(self) -> None:
        if self._closed:
            raise RuntimeError("the executor was shut down")

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._masks.close()
        try:
            self._launcher.submit(self.worker.shutdown).result()
        except RuntimeError:
            # The interpreter is exiting: its thread pools are closed, so nothing runs beside us.
            self.worker.shutdown()
        self._launcher.shutdown()
        self._collector.shutdown()


def _collect(
    launched: Future[ModelRunnerOutput | AsyncModelRunnerOutput],
) -> ModelRunnerOutput:
    output = launched.result()
    return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output
