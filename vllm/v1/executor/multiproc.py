# SPDX-License-Identifier: Apache-2.0
"""One process per worker on this host.

Every message goes to all workers at once. Results of a step come from the first rank of the last
pipeline stage, or from all ranks if a connector reports something on each. One thread takes the
answers and watches the processes: the death of one ends all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import selectors
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import psutil

from vllm import decisions
from vllm.logger import init_logger
from vllm.utils import startup_phases
from vllm.utils.start_method import start_method
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor, overdue_message
from vllm.v1.executor.broadcast import Sender
from vllm.v1.executor.worker_process import Answer, Kind, WorkerSetup, run_worker
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.serial_utils import pickle_setup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.aggregator import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.worker.worker import Worker

logger = init_logger(__name__)

#: a worker's failure is often another one's death, which is then seen this soon
_BLAME_S = 0.5
#: how long workers may take to stop before they are killed: at the end, and after a failure
_STOP_S = 10.0
_LAST_WORDS_S = 1.5


class WorkerDiedError(RuntimeError):
    """A worker's process ended by itself."""


class _Question:
    """A message to all workers, and the answers of those that give one.

    `combine` makes the future's result of their values, in rank order.
    """

    def __init__(self, ranks: range, combine: Callable[[list[Any]], Any] = list) -> None:
        self.ranks = ranks
        self.future: Future[Any] = Future()
        self._combine = combine
        self._answers: dict[int, Answer] = {}

    def answered(self, rank: int, answer: Answer) -> None:
        """Once all have answered, the future has its result or the first error."""
        self._answers[rank] = answer
        if len(self._answers) < len(self.ranks) or self.future.done():
            return
        answers = [self._answers[rank] for rank in self.ranks]
        try:
            for one in answers:
                if one.error is not None:
                    raise one.error
            self.future.set_result(self._combine([one.value for one in answers]))
        except Exception as error:
            self.future.set_exception(error)


class _Process:
    """A worker's process, the pipe with its answers, and the questions it has not answered yet."""

    def __init__(self, rank: int, process: BaseProcess, answers: Connection) -> None:
        self.rank = rank
        self.process = process
        self.answers = answers
        self.open: deque[_Question] = deque()

    @property
    def was_killed(self) -> bool:
        return (self.process.exitcode or 0) < 0

    def death(self) -> WorkerDiedError:
        code = self.process.exitcode
        how = signal.Signals(-code).name if self.was_killed and code else f"exit code {code}"
        return WorkerDiedError(f"the worker of rank {self.rank} died ({how})")


class MultiprocExecutor(Executor):
    """Starts a process per rank; the model is loaded when the constructor returns."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        parallel = vllm_config.parallel_config
        self._ranks = range(parallel.world_size)
        self._output_rank = parallel.output_rank
        # A connector may report something on any rank.
        only = range(self._output_rank, self._output_rank + 1)
        self._step_ranks = self._ranks if vllm_config.kv_transfer_config else only
        self._aggregator: KVOutputAggregator | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._is_loaded = False
        self._asking = threading.Lock()
        self._ending = threading.Lock()
        self._failing = threading.Lock()
        self._stop_read, self._stop_write = os.pipe()
        self._processes: list[_Process] = []
        self._collector = threading.Thread(target=self._collect, name="collect", daemon=True)
        method = start_method("workers")
        decisions.record("workers", f"{len(self._ranks)} processes", f"one per rank, by {method}")
        context = get_context(method)
        self._sender = Sender(context, len(self._ranks))
        directory = tempfile.mkdtemp(prefix="vllm-")
        try:
            with startup_phases.startup_phase("spawn workers"):
                self._start(context, f"file://{directory}/store")
            atexit.register(self.shutdown)
            loaded = _Question(self._ranks)
            for process in self._processes:
                process.open.append(loaded)
            self._collector.start()
            loaded.future.result()
            self._is_loaded = True
        except BaseException:
            self.shutdown()
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # the ranks have met

    def _start(self, context: Any, init_method: str) -> None:
        receivers = self._sender.receivers
        pipes = [context.Pipe(duplex=False) for _ in self._ranks]
        ends = [*self._sender.connections, *(end for pipe in pipes for end in pipe)]
        config = pickle_setup(self.vllm_config)
        for rank, (ours, theirs) in enumerate(pipes):
            own = (receivers[rank].wake, theirs)
            inherits = context.get_start_method() == "fork"
            setup = WorkerSetup(
                config,
                rank,
                init_method,
                rank in self._step_ranks,
                rank >= self._output_rank,
                os.getpid(),
                tuple(end for end in ends if end not in own) if inherits else (),
            )
            process = context.Process(
                target=run_worker, args=(setup, receivers[rank], theirs), name=f"vllm-worker-{rank}"
            )
            process.start()
            self._processes.append(_Process(rank, process, ours))
        for receiver, (_, theirs) in zip(receivers, pipes, strict=True):
            receiver.close()
            theirs.close()

    # ---- what the core asks --------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return self.collective_rpc("get_kv_cache_spec")

    def determine_available_memory(self) -> list[int]:
        return self.collective_rpc("determine_available_memory")

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self.collective_rpc(_initialize, args=(kv_cache_configs,))

    def init_kv_output_aggregator(self, connector: KVConnectorBase_V1) -> None:
        from vllm.distributed.kv_transfer.kv_connector.aggregator import KVOutputAggregator

        self._aggregator = KVOutputAggregator.from_connector(connector, len(self._ranks))

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        question = _Question(self._step_ranks, self._step_result)
        self._ask(Kind.STEP, scheduler_output, question)
        return question.future

    def _step_result(self, outputs: list[ModelRunnerOutput]) -> ModelRunnerOutput | None:
        place = self._step_ranks.index(self._output_rank)
        return (
            outputs[place]
            if self._aggregator is None
            else self._aggregator.aggregate(outputs, place)
        )

    def send_token_masks(self, words: np.ndarray) -> None:
        self._ask(Kind.MASKS, words)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        question = _Question(self._ranks)
        self._ask(Kind.CALL, cloudpickle.dumps((method, args, kwargs or {})), question)
        results: list[Any] = question.future.result(timeout)
        return results

    def check_health(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError("the executor was shut down")

    def _ask(self, kind: Kind, content: Any, question: _Question | None = None) -> None:
        message = pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL)
        with self._asking:
            self.check_health()
            if question is not None:
                for rank in question.ranks:
                    self._processes[rank].open.append(question)
            self._sender.send(message, self.check_health)

    # ---- answers and deaths (collecting thread) ------------------------------------------------

    def _collect(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop_read, selectors.EVENT_READ)
            for process in self._processes:
                selector.register(process.answers, selectors.EVENT_READ, process)
            while True:
                for key, _ in selector.select():
                    process = key.data
                    if process is None:
                        return
                    try:
                        self._take(process, process.answers.recv_bytes())
                    except EOFError:  # only its end closes a worker's pipe
                        selector.unregister(process.answers)
                        self._ended(process)
                    if self._failure is not None:
                        return

    def _take(self, process: _Process, message: bytes) -> None:
        answer: Answer = pickle.loads(message)
        self.vllm_config.decisions.adopt(answer.decisions)
        startup_phases.adopt(answer.phases)
        if answer.is_fatal:
            assert answer.error is not None
            self._fail(self._cause(process, answer.error))
        else:
            process.open.popleft().answered(process.rank, answer)

    def _cause(self, failed: _Process, error: Exception) -> Exception:
        """A worker that is killed takes the collectives of the others with it."""
        others = [p for p in self._processes if p is not failed]
        ready = wait([p.process.sentinel for p in others], _BLAME_S)
        ended = [p for p in others if p.process.sentinel in ready]
        for other in ended:
            other.process.join(_BLAME_S)
        return next((other.death() for other in ended if other.was_killed), error)

    def _ended(self, process: _Process) -> None:
        if self._closed or self._failure is not None:
            return
        process.process.join(_BLAME_S)
        self._fail(process.death())

    def overdue(self) -> Exception:
        """Ends all workers; the error names those that do not go on, if that can be seen."""
        suspects = self._stopped() or self._sender.slowest_receivers()
        ranks = ", ".join(map(str, suspects))
        who = f"the worker of rank {ranks} does not go on: " if suspects else ""
        self._fail(TimeoutError(who + overdue_message(self.step_timeout_s)))
        assert self._failure is not None, "who waits for a step has not shut the executor down"
        return self._failure

    def _stopped(self) -> list[int]:
        """Ranks whose processes do not run, and have not ended."""
        found = []
        for one in self._processes:
            with contextlib.suppress(psutil.Error):
                if psutil.Process(one.process.pid).status() == psutil.STATUS_STOPPED:
                    found.append(one.rank)
        return found

    def _fail(self, error: Exception) -> None:
        """End all workers, then whoever waits for one."""
        with self._failing:
            if self._failure is not None or self._closed:
                return
            self._failure = error
        logger.error("%s; ending all workers", error)
        self._fail_questions(error)
        if self._on_failure is not None:
            self._on_failure(error)
        self._end_processes(_LAST_WORDS_S)

    def _fail_questions(self, error: Exception) -> None:
        with self._asking:
            for process in self._processes:
                for question in process.open:
                    if not question.future.done():
                        question.future.set_exception(error)
                process.open.clear()

    # ---- the end -------------------------------------------------------------------------------

    def _end_processes(self, patience_s: float) -> None:
        """Tell the processes to stop, wait that long, then kill them."""
        with self._ending:
            deadline = time.monotonic() + patience_s
            with contextlib.suppress(_GivenUp), self._asking:
                self._sender.send(pickle.dumps((Kind.STOP, None)), _give_up)
            for process in self._processes:
                process.process.join(max(0.0, deadline - time.monotonic()))
            for process in self._processes:
                process.process.kill()
                process.process.join()

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        if self._failure is None:
            self._end_processes(_STOP_S if self._is_loaded else 0.0)
        if self._collector.ident is not None:
            os.write(self._stop_write, b"x")
            self._collector.join()
        self._fail_questions(RuntimeError("the executor was shut down"))
        self._sender.close()
        for process in self._processes:
            process.answers.close()
        os.close(self._stop_read)
        os.close(self._stop_write)


class _GivenUp(Exception):
    """A worker takes no messages any more."""


def _give_up() -> None:
    raise _GivenUp


def _initialize(worker: Worker, kv_cache_configs: list[KVCacheConfig]) -> None:
    worker.initialize_from_config(kv_cache_configs[worker.rank])
    worker.warm_up()
