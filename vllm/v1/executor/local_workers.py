# SPDX-License-Identifier: Apache-2.0
"""One process per worker on this host: messages by shared memory, answers through pipes."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from vllm import decisions
from vllm.utils.activity import Activity, is_stopped
from vllm.utils.exit_status import ending_signal, how_it_ended
from vllm.utils.start_method import start_method
from vllm.v1.executor.broadcast import Sender
from vllm.v1.executor.station import Source, Station, WorkerDiedError
from vllm.v1.executor.worker_process import Closable, Kind, WorkerPlan, WorkerSetup, run_worker

#: how long the exit code of a process may come after the end of its pipe, on a busy machine
_EXIT_S = 5.0


@dataclass(frozen=True)
class _Process:
    """A worker's process, and the pipe with its answers."""

    rank: int
    process: BaseProcess
    answers: Connection

    def death(self) -> WorkerDiedError:
        self.process.join(_EXIT_S)
        code = self.process.exitcode
        message = f"the worker of rank {self.rank} died ({how_it_ended(code)})"
        return WorkerDiedError(message, ending_signal(code) is not None)


class LocalWorkers(Station):
    """Starts a process for each of `ranks`.

    `interface`: see `WorkerSetup`. `connections`: those of this process to other hosts, whose end
    must be seen there as soon as this process is gone.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        ranks: range,
        interface: str | None = None,
        connections: Sequence[Closable] = (),
    ) -> None:
        self.ranks = ranks
        method = start_method("workers")
        decisions.record("workers", f"{len(ranks)} processes", f"one per rank, by {method}")
        context = get_context(method)
        self.sender = Sender(context, len(ranks))
        self._processes: list[_Process] = []
        self._activities: dict[int, Activity] = {}
        try:
            self._start(context, plan, interface, connections)
        except BaseException:
            self.finish_end(0.0)
            self.close()
            raise

    def _start(
        self,
        context: Any,
        plan: WorkerPlan,
        interface: str | None,
        connections: Sequence[Closable],
    ) -> None:
        receivers = self.sender.receivers
        pipes = [context.Pipe(duplex=False) for _ in self.ranks]
        ends = [*self.sender.connections, *(end for pipe in pipes for end in pipe)]
        inherits = context.get_start_method() == "fork"
        for local_rank, (rank, (ours, theirs)) in enumerate(zip(self.ranks, pipes, strict=True)):
            receiver = receivers[local_rank]
            own = (receiver.wake, theirs)
            others = [end for end in ends if end not in own]
            foreign = (*others, *connections) if inherits else ()
            setup = WorkerSetup(plan, rank, local_rank, os.getpid(), interface, foreign)
            process = context.Process(
                target=run_worker, args=(setup, receiver, theirs), name=f"vllm-worker-{rank}"
            )
            process.start()
            assert process.pid is not None
            self._processes.append(_Process(rank, process, ours))
            self._activities[rank] = Activity(process.pid)
        for receiver, (_, theirs) in zip(receivers, pipes, strict=True):
            receiver.close()
            theirs.close()

    def send(self, message: bytes, check: Callable[[], None]) -> None:
        self.sender.send(message, check)

    @property
    def sources(self) -> list[Source]:
        return [one.answers for one in self._processes]

    def take(self, source: Source) -> list[tuple[int, bytes]]:
        one = next(one for one in self._processes if one.answers is source)
        try:
            return [(one.rank, one.answers.recv_bytes())]
        except EOFError:  # only its end closes a worker's pipe
            raise one.death() from None

    def slow_ranks(self) -> list[int]:
        stopped = [one.rank for one in self._processes if is_stopped(one.process.pid)]
        return stopped or [self.ranks[index] for index in self.sender.slowest_receivers()]

    def sees_work(self, rank: int) -> bool | None:
        return self._activities[rank].is_seen()

    @property
    def has_ended(self) -> bool:
        """Whether a process has."""
        return any(one.process.exitcode is not None for one in self._processes)

    def begin_end(self, reason: str | None) -> None:
        with contextlib.suppress(_GivenUp):
            self.sender.send(pickle.dumps((Kind.STOP, None)), _give_up)

    def finish_end(self, deadline: float) -> None:
        for one in self._processes:
            one.process.join(max(0.0, deadline - time.monotonic()))
        for one in self._processes:
            one.process.kill()
            one.process.join()

    def close(self) -> None:
        self.sender.close()
        for one in self._processes:
            one.answers.close()


class _GivenUp(Exception):
    """A worker takes no messages any more."""


def _give_up() -> None:
    raise _GivenUp
