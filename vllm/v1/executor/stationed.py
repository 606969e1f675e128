# SPDX-License-Identifier: Apache-2.0
"""Workers in other processes, on this host or on several.

Every message goes to all workers at once. Results of a step come from the first rank of the last
pipeline stage, or from all ranks if a connector reports something on each. One thread takes the
answers and sees the ends of workers: the end of one ends all of them. So does a hang, see
`hang_watch`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import selectors
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

import cloudpickle

from vllm.exceptions import HangError, VLLMValidationError
from vllm.logger import init_logger
from vllm.utils import startup_phases
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor, overdue_message, result_of_call
from vllm.v1.executor.hang_watch import HangWatch
from vllm.v1.executor.pulse import Beat, Pulse
from vllm.v1.executor.replica_reports import reports_of
from vllm.v1.executor.station import Source, Station, WorkerDiedError
from vllm.v1.executor.worker_process import Answer, Kind, WorkerPlan
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output.mask_words import FilledMasks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.rendezvous import MeetingPlace

logger = init_logger(__name__)

#: a worker's failure is often another one's death, which is then seen this soon: on one host, and
#: on several
_BLAME_S = 0.5
_BLAME_OF_HOSTS_S = 3.0
#: how long workers may take to stop before they are killed: at the end, and after a failure
STOP_S = 10.0
LAST_WORDS_S = 1.5


class StationedExecutor(Executor):
    """Asks workers that are reached by `stations`, which a subclass gives to `_begin`; they have
    loaded the model when the constructor returns."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        parallel = vllm_config.parallel_config
        self._ranks = range(parallel.world_size)
        self._output_rank = parallel.output_rank
        self._aggregator: KVOutputAggregator | None = None
        self._failure: Exception | None = None
        self._blamed: tuple[Exception, float] | None = None
        self._closed = False
        self._is_loaded = False
        self._asking = threading.Lock()
        self._ending = threading.Lock()
        self._failing = threading.Lock()
        self._stop_read, self._stop_write = os.pipe()
        self._stations: Sequence[Station] = ()
        #: of hosts; stays: some communicators are made at their first use
        self._place: MeetingPlace | None = None
        self._step_ranks = range(0)
        self._open: list[deque[Question]] = [deque() for _ in self._ranks]
        self._collector = threading.Thread(target=self._collect, name="collect", daemon=True)
        self._watch = HangWatch(
            self._ranks, self._allowed_s, self._sees_work, self._fail, reports_of(parallel)
        )
        #: of the engine core's thread, which may wait for other replicas
        self._pulse: Pulse | None = None
        try:
            self._start()
        except BaseException:
            self.shutdown()
            raise

    @abstractmethod
    def _start(self) -> None:
        """Start the workers, and `_begin`."""

    def _begin(self, plan: WorkerPlan, stations: Sequence[Station]) -> None:
        """The workers of `stations` have been started; waits until they have loaded the model."""
        self._stations = stations
        self._step_ranks = plan.step_ranks
        atexit.register(self.shutdown)
        loaded = Question(self._ranks)
        for questions in self._open:
            questions.append(loaded)
        for station in stations:
            if station.name:
                self._watch.locate(station.ranks, station.name)
        self._collector.start()
        self._watch.start()
        if self.vllm_config.parallel_config.replicas_share_experts:
            self._pulse = Pulse(self._watch.take_core, alone=True)
        loaded.future.result()
        self._is_loaded = True

    # ---- what the core asks --------------------------------------------------------------------

    def init_kv_output_aggregator(self, connector: KVConnectorBase_V1) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self._aggregator = KVOutputAggregator.from_connector(connector, len(self._ranks))

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        question = Question(self._step_ranks, self._step_result)
        self._ask(Kind.STEP, scheduler_output, question)
        return question.future

    def _step_result(self, outputs: list[ModelRunnerOutput]) -> ModelRunnerOutput | None:
        place = self._step_ranks.index(self._output_rank)
        return (
            outputs[place]
            if self._aggregator is None
            else self._aggregator.aggregate(outputs, place)
        )

    def send_token_masks(self, masks: FilledMasks) -> None:
        self._ask(Kind.MASKS, masks)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        question = Question(self._ranks, patience_s=timeout or 0.0)
        self._ask(Kind.CALL, cloudpickle.dumps((method, args, kwargs or {})), question)
        results: list[Any] = result_of_call(question.future, method, timeout)
        return results

    def check_health(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RuntimeError("the executor was shut down")

    def _ask(self, kind: Kind, content: Any, question: Question | None = None) -> None:
        message = pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL)
        with self._asking:
            self.check_health()
            if question is not None:
                for rank in question.ranks:
                    self._open[rank].append(question)
            for station in self._stations:
                station.send(message, self.check_health)

    # ---- answers and deaths (collecting thread) ------------------------------------------------

    def _collect(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop_read, selectors.EVENT_READ)
            for station in self._stations:
                for source in station.sources:
                    selector.register(source, selectors.EVENT_READ, (station, source))
            while self._failure is None:
                for key, _ in selector.select(self._patience_s()):
                    if key.data is None:
                        return
                    station, source = key.data
                    try:
                        self._take_all(station, source)
                    except WorkerDiedError as death:
                        selector.unregister(source)
                        self._ended(death)
                if self._blamed is not None and self._patience_s() == 0:
                    self._fail(self._blamed[0])

    def _patience_s(self) -> float | None:
        """How long the error of a worker waits for the death that it may come from."""
        return None if self._blamed is None else max(0.0, self._blamed[1] - time.monotonic())

    def _take_all(self, station: Station, source: Source) -> None:
        for rank, message in station.take(source):
            answer: Answer | Beat = pickle.loads(message)
            if isinstance(answer, Beat):
                self._watch.take(rank, answer)
                continue
            self.vllm_config.decisions.adopt(answer.decisions)
            startup_phases.adopt(answer.phases)
            if not answer.is_fatal:
                # Another thread may have failed all questions meanwhile.
                with contextlib.suppress(IndexError):
                    self._open[rank].popleft().answered(rank, answer)
            elif self._blamed is None:
                assert answer.error is not None
                patience_s = self._blame_s(answer.error)
                self._blamed = answer.error, time.monotonic() + patience_s

    # ---- hangs (watching thread) ---------------------------------------------------------------

    def _allowed_s(self) -> float | None:
        """The longest time that any open question may take; None without one."""
        longest_s: float | None = None
        for questions in self._open:
            with contextlib.suppress(IndexError):  # answered just now
                longest_s = max(longest_s or 0.0, questions[0].patience_s)
        return longest_s

    def _sees_work(self, rank: int) -> bool | None:
        station = next(one for one in self._stations if rank in one.ranks)
        return station.sees_work(rank)

    # ---- the ends of workers -------------------------------------------------------------------

    def _blame_s(self, error: Exception) -> float:
        """A worker that is killed takes the collectives of the others with it; what a user can
        mend has no such cause."""
        if isinstance(error, VLLMValidationError):
            return 0.0
        return _BLAME_S if len(self._stations) == 1 else _BLAME_OF_HOSTS_S

    def _ended(self, death: WorkerDiedError) -> None:
        if self._blamed is None or death.was_killed:
            self._fail(death)

    def overdue(self) -> Exception:
        """Ends all workers; the error names those that do not go on, if that can be seen."""
        slow = [rank for station in self._stations for rank in station.slow_ranks()]
        ranks = ", ".join(map(str, slow))
        who = f"the worker of rank {ranks} does not go on: " if slow else ""
        what = f"{who}{overdue_message(self.step_timeout_s)}; {self._watch.places()}"
        self._fail(HangError(what))
        assert self._failure is not None, "who waits for a step has not shut the executor down"
        return self._failure

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
        self._end_workers(LAST_WORDS_S, str(error))

    def _fail_questions(self, error: Exception) -> None:
        with self._asking:
            for questions in self._open:
                for question in questions:
                    question.failed(error)
                questions.clear()

    # ---- the end -------------------------------------------------------------------------------

    def _end_workers(self, patience_s: float, reason: str | None = None) -> None:
        """Tell the workers to stop, wait that long, then end them."""
        with self._ending:
            deadline = time.monotonic() + patience_s
            with self._asking:
                for station in self._stations:
                    station.begin_end(reason)
            for station in self._stations:
                station.finish_end(deadline)

    def shutdown(self, reason: str | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        self._watch.stop()
        if self._pulse is not None:
            self._pulse.stop()
        if self._failure is None:
            if self._is_loaded:
                self._end_workers(STOP_S, reason)
            else:
                self._end_workers(0.0, reason or "the engine did not start")
        if self._collector.ident is not None:
            os.write(self._stop_write, b"x")
            self._collector.join()
        self._fail_questions(RuntimeError("the executor was shut down"))
        for station in self._stations:
            station.close()
        os.close(self._stop_read)
        os.close(self._stop_write)
        if self._place is not None:
            self._place.close()


class Question:
    """A message to all workers, and the answers of those that give one.

    `combine` makes the future's result of their values, in rank order; `patience_s`: how
    long whoever asks has said that it may take.
    """

    def __init__(
        self,
        ranks: range,
        combine: Callable[[list[Any]], Any] = list,
        patience_s: float = 0.0,
    ) -> None:
        self.ranks = ranks
        self.patience_s = patience_s
        self.future: Future[Any] = Future()
        self._combine = combine
        self._answers: dict[int, Answer] = {}

    def answered(self, rank: int, answer: Answer) -> None:
        """Once all have answered, the future has its result or the first error."""
        self._answers[rank] = answer
        if len(self._answers) < len(self.ranks):
            return
        answers = [self._answers[rank] for rank in self.ranks]
        try:
            for one in answers:
                if one.error is not None:
                    raise one.error
            result = self._combine([one.value for one in answers])
        except Exception as error:
            self.failed(error)
            return
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(result)

    def failed(self, error: Exception) -> None:
        """Unless it has a result already, which another thread may be setting."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)
