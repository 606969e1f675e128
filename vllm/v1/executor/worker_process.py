# SPDX-License-Identifier: Apache-2.0
"""One worker in a process of its own: what it is told, and what it answers.

Messages arrive by broadcast, as pickled `(Kind, content)`: `STEP` a scheduler output, `MASKS` the
token masks of the oldest step that waits for them, `CALL` a cloudpickled `(method, args, kwargs)`
for `Worker.call`, `STOP` nothing. Answers leave through a pipe in the order of their messages:
one for each call, and one for each step if this worker answers steps or the step failed. Between
them, a pickled `Beat` every second.
"""

from __future__ import annotations

import enum
import logging
import os
import pickle
import queue
import signal
import threading
from collections import deque
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from vllm import decisions
from vllm.exceptions import ExplainedError
from vllm.logger import init_logger
from vllm.utils import startup_phases
from vllm.utils.parent_watch import ParentWatch
from vllm.utils.phase_ledger import PhaseEvent
from vllm.utils.waiting import waiting_for
from vllm.v1.executor.pulse import NEXT_MESSAGE, Beat, Pulse
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.serial_utils import pickle_setup, unpickle_setup
from vllm.v1.structured_output.mask_words import FilledMasks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker import Worker

logger = init_logger(__name__)

#: how long a worker that has lost its parent may take to stop
_ORPHAN_GRACE_S = 3.0


class Kind(enum.IntEnum):
    """See the module docstring."""

    STEP = 0
    MASKS = 1
    CALL = 2
    STOP = 3


class Closable(Protocol):
    """A file of some kind."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class WorkerPlan:
    """What the workers of all ranks start from. `config`: a pickled `VllmConfig`; `init_method`:
    where they meet; `step_ranks`: those that answer steps; `output_rank`: the first of the pipeline
    stage that samples, and waits for token masks."""

    config: bytes
    init_method: str
    step_ranks: range
    output_rank: int

    @classmethod
    def of(cls, vllm_config: VllmConfig, init_method: str) -> WorkerPlan:
        parallel = vllm_config.parallel_config
        first, size = parallel.output_rank, parallel.world_size
        # A connector may report something on any rank.
        steps = range(size) if vllm_config.kv_transfer_config else range(first, first + 1)
        return cls(pickle_setup(vllm_config), init_method, steps, first)


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker of rank `rank`, the `local_rank`-th of its host, starts from.

    `interface`: the network interface that leads to the other hosts, if it is known. `foreign`:
    ends of pipes and connections that a forked process has inherited and that belong to others.
    """

    plan: WorkerPlan
    rank: int
    local_rank: int
    parent_pid: int
    interface: str | None = None
    foreign: tuple[Closable, ...] = ()


@dataclass(frozen=True)
class Answer:
    """Of a step: `ModelRunnerOutput`; of a call: its result; or the `error` of either.

    `is_fatal`: the worker ends with this error. `decisions` and `phases` are what the worker of
    rank 0 has recorded since its last answer to a call.
    """

    value: Any = None
    error: Exception | None = None
    is_fatal: bool = False
    decisions: list[decisions.Decision] = field(default_factory=list)
    phases: list[PhaseEvent] = field(default_factory=list)


class Receives(Protocol):
    """Where messages come from."""

    def receive(self) -> bytes:
        """Wait for the next one; EOFError when the executor is gone."""


class TakesAnswers(Closable, Protocol):
    """Where answers go."""

    def send_bytes(self, answer: bytes, /) -> None:
        """OSError when the executor is gone."""


class Inbox:
    """Messages in the order in which they are needed: masks come after steps that need none yet."""

    def __init__(self, receiver: Receives, keeps_masks: bool = True) -> None:
        self._receiver, self._keeps_masks = receiver, keeps_masks
        self._work: deque[tuple[Kind, Any]] = deque()
        self._masks: deque[FilledMasks] = deque()

    def next_work(self) -> tuple[Kind, Any]:
        """The next step, call or stop; EOFError when the sender is gone."""
        with waiting_for(NEXT_MESSAGE):
            while not self._work:
                self._take()
        return self._work.popleft()

    def receive_masks(self) -> FilledMasks:
        """See `vllm.v1.structured_output.masks.ReceiveMasks`."""
        with waiting_for(NEXT_MESSAGE):
            while not self._masks:
                if self._work and self._work[-1][0] is Kind.STOP:
                    raise CancelledError("the step's masks are not coming: the engine stops")
                self._take()
        return self._masks.popleft()

    def _take(self) -> None:
        kind, content = pickle.loads(self._receiver.receive())
        if kind is Kind.MASKS:
            if self._keeps_masks:
                self._masks.append(content)
        else:
            self._work.append((kind, content))


class Outbox:
    """Sends answers on a thread, which also waits for the device to finish a step."""

    def __init__(self, connection: TakesAnswers) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="answers", daemon=True)
        self._thread.start()

    def put(self, answer: Answer) -> None:
        self._answers.put(answer)

    def send_beat(self, beat: Beat) -> None:
        """At once, also while an answer waits for the device. OSError when the executor is gone."""
        self._send(pickle.dumps(beat, pickle.HIGHEST_PROTOCOL))

    def close(self) -> None:
        """Wait until everything is sent. No beat may be sent any more."""
        self._answers.put(None)
        self._thread.join()
        self._connection.close()

    def _send_all(self) -> None:
        while (answer := self._answers.get()) is not None:
            try:
                self._send(_pickled(answer))
            except OSError:
                return  # The executor is gone, which the main thread notices as well.

    def _send(self, message: bytes) -> None:
        with self._sending:
            self._connection.send_bytes(message)


class Records:
    """What a worker has decided and how long its start took, as far as it was not sent yet."""

    def __init__(self, rank: int, log: decisions.DecisionLog) -> None:
        self._rank = rank
        self._log = log
        self._sent = set(log.decisions())

    def added_to(self, answer: Answer) -> Answer:
        """The same on every rank, so that the first one's are enough."""
        if self._rank:
            return answer
        new = [decision for decision in self._log.decisions() if decision not in self._sent]
        self._sent.update(new)
        return replace(answer, decisions=new, phases=startup_phases.take_events())


def _pickled(answer: Answer) -> bytes:
    """An answer that cannot travel becomes one that says so."""
    try:
        if isinstance(answer.value, AsyncModelRunnerOutput):
            answer = Answer(answer.value.get_output())
        data = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        if answer.error is not None:
            pickle.loads(data)
        return data
    except Exception as failure:
        cause = failure if answer.error is None else answer.error
        error = RuntimeError(f"{type(cause).__name__}: {cause}")
        is_fatal = answer.is_fatal or isinstance(answer.value, AsyncModelRunnerOutput)
        return pickle.dumps(Answer(error=error, is_fatal=is_fatal), pickle.HIGHEST_PROTOCOL)


def run_worker(setup: WorkerSetup, receiver: Receives, answers: TakesAnswers) -> None:
    """Entry point of the process. The first answer says whether the model is loaded.

    Ends with a `STOP`, or when the executor's process is gone; SIGTERM is for that one.
    """
    for inherited in setup.foreign:
        inherited.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, partial(_end_as_orphan, setup.parent_pid))
    ParentWatch(setup.parent_pid, _ORPHAN_GRACE_S).start()
    # A forked process begins with copies of its parent's records.
    startup_phases.take_events()
    plan = setup.plan
    inbox, outbox = Inbox(receiver, setup.rank >= plan.output_rank), Outbox(answers)
    pulse = Pulse(outbox.send_beat)
    worker: Worker | None = None
    try:
        config: VllmConfig = unpickle_setup(plan.config)
        records = Records(setup.rank, config.decisions)
        worker = _start(setup, config, inbox)
        outbox.put(records.added_to(Answer()))
        _serve(worker, setup, inbox, outbox, records)
    except CancelledError:
        """The executor stops in the middle of a step."""
    except Exception as error:
        if not isinstance(error, ExplainedError):
            logger.exception("worker %d failed", setup.rank)
        outbox.put(Answer(error=error, is_fatal=True))
        raise SystemExit(1) from None
    finally:
        if worker is not None:
            worker.shutdown()
        pulse.stop()
        outbox.close()


def _start(setup: WorkerSetup, config: VllmConfig, inbox: Inbox) -> Worker:
    from vllm.platforms import current_platform
    from vllm.v1.worker.worker import Worker

    if setup.rank:
        # All ranks decide and do the same: the first one tells.
        logging.getLogger("vllm").setLevel(logging.WARNING)
    config.load_config.use_tqdm_on_load &= setup.rank == 0
    if setup.interface is not None:
        with config.decisions.current():
            current_platform.communicate_over(setup.interface)
    init_method = setup.plan.init_method
    worker = Worker(config, setup.local_rank, setup.rank, init_method, inbox.receive_masks)
    worker.init_device()
    worker.load_model()
    return worker


def _serve(
    worker: Worker, setup: WorkerSetup, inbox: Inbox, outbox: Outbox, records: Records
) -> None:
    answers_steps = setup.rank in setup.plan.step_ranks
    while True:
        try:
            kind, content = inbox.next_work()
        except EOFError:
            return
        if kind is Kind.STOP:
            return
        if kind is Kind.CALL:
            outbox.put(records.added_to(_call(worker, content)))
        else:
            output = worker.execute_model(content)
            if answers_steps:
                outbox.put(Answer(output))


def _call(worker: Worker, packed: bytes) -> Answer:
    try:
        method, args, kwargs = pickle.loads(packed)
        return Answer(worker.call(method, args, kwargs))
    except Exception as error:
        return Answer(error=error)


def _end_as_orphan(parent_pid: int, signum: int, frame: FrameType | None) -> None:
    """Some service managers send SIGTERM to all processes: the first one's stops the others."""
    if os.getppid() != parent_pid:
        raise SystemExit(128 + signum)
