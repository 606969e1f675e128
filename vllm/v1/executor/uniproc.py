# SPDX-License-Identifier: Apache-2.0
"""One worker in the engine core's own process.

Steps are launched on one thread and their results awaited on another, so the core schedules step
n + 1 while step n runs. Where replicas share experts the worker may wait for those of others, so
hangs are looked for, see `hang_watch`: a thread cannot be ended, so its process is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor, result_of_call
from vllm.v1.executor.hang_watch import HangWatch
from vllm.v1.executor.pulse import NEXT_MESSAGE, Beat, Pulse
from vllm.v1.executor.replica_reports import reports_of
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.structured_output.mask_words import FilledMasks
from vllm.v1.structured_output.masks import MaskQueue
from vllm.v1.worker.worker import Worker

if TYPE_CHECKING:
    from vllm.config.parallel import ParallelConfig

logger = init_logger(__name__)

T = TypeVar("T")

#: how long a process whose worker hangs may take to say so
_LAST_WORDS_S = 3.0


class UniProcExecutor(Executor):
    """Runs the worker on a thread of this process."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="launch")
        self._collector = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self._closed = False
        self._failure: Exception | None = None
        #: how long the caller of the worker lets it take
        self._patience_s = 0.0
        self._open: set[Future[Any]] = set()
        self._changing = threading.Lock()
        self._pulses: list[Pulse] = []
        self._watch: HangWatch | None = None
        if vllm_config.parallel_config.replicas_share_experts:
            self._watch_replicas(vllm_config.parallel_config)
        self._masks = MaskQueue()
        self.worker = Worker(vllm_config, receive_masks=self._masks.receive)
        # Device state (current device, stream, thread counts) belongs to the launching thread.
        try:
            for start in (self.worker.init_device, self.worker.load_model):
                self._promise(self._launcher.submit(start)).result()
        except BaseException:
            self._stop_watching()
            if self._failure is not None:
                _end_process()
            raise

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.check_health()
        launched = self._launcher.submit(self.worker.execute_model, scheduler_output)
        return self._promise(self._collector.submit(_collect, launched))

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
        self.check_health()
        call = self._launcher.submit(self.worker.call, method, args, kwargs or {})
        self._patience_s = timeout or 0.0
        return [result_of_call(self._promise(call), method, timeout)]

    def check_health(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError("the executor was shut down")

    def shutdown(self, reason: str | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._masks.close()
        self._stop_watching()
        if self._failure is not None:
            _end_process()
            return
        try:
            self._launcher.submit(self.worker.shutdown).result()
        except RuntimeError:
            # The interpreter is exiting: its thread pools are closed, so nothing runs beside us.
            self.worker.shutdown()
        self._launcher.shutdown()
        self._collector.shutdown()

    # ---- replicas that share experts -----------------------------------------------------------

    def _watch_replicas(self, parallel: ParallelConfig) -> None:
        watch = self._watch = HangWatch(
            range(1), self._allowed_s, lambda rank: True, self._fail, reports_of(parallel)
        )
        self._pulses = [
            Pulse(watch.take_core, alone=True),
            self._launcher.submit(Pulse, self._take_beat).result(),
        ]
        watch.start()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        for pulse in self._pulses:
            pulse.stop()

    def _take_beat(self, beat: Beat) -> None:
        assert self._watch is not None
        if not self._open:
            beat = replace(beat, waits_for=NEXT_MESSAGE, is_idle=True, frames="")
        self._watch.take(0, beat)

    def _allowed_s(self) -> float | None:
        return self._patience_s if self._open else None

    def _promise(self, work: Future[T]) -> Future[T]:
        """What becomes of `work`, or that the worker hangs."""
        if self._watch is None:
            return work
        promise: Future[T] = Future()
        with self._changing:
            self._open.add(promise)
        work.add_done_callback(partial(self._done, promise))
        return promise

    def _done(self, promise: Future[T], work: Future[T]) -> None:
        with self._changing:
            if promise not in self._open:
                return
            self._open.remove(promise)
            self._patience_s = 0.0
        if (error := work.exception()) is not None:
            promise.set_exception(error)
        else:
            promise.set_result(work.result())

    def _fail(self, error: Exception) -> None:
        logger.error("%s; ending the worker", error)
        self._failure = error
        with self._changing:
            promises, self._open = self._open, set()
        for promise in promises:
            promise.set_exception(error)
        if self._on_failure is not None:
            self._on_failure(error)


def _end_process() -> None:
    """A thread of this process does not end; the others have a moment to say what is wrong."""

    def end() -> None:
        time.sleep(_LAST_WORDS_S)
        os._exit(1)

    threading.Thread(target=end, name="end-process", daemon=True).start()


def _collect(
    launched: Future[ModelRunnerOutput | AsyncModelRunnerOutput],
) -> ModelRunnerOutput:
    output = launched.result()
    return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output
