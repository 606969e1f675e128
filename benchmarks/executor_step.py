# SPDX-License-Identifier: Apache-2.0
"""What an executor adds to a decode step: `python -m benchmarks.executor_step [--batch 256]`.

The workers compute nothing. Prints, for the worker in the engine's process (`uni`) and for one, two
and four processes (`mp`), microseconds per step: CPU time of the core's thread, and wall time from
giving the step to having its result, alone and with two steps in flight. Best and median of the
rounds' means (another process on the machine only adds).
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from statistics import median
from typing import Any

from benchmarks.host_step import make_config
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.executor import uniproc
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.uniproc import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker import worker


class NoWorker:
    """Every request of every step gets the token 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def init_device(self) -> None: ...

    def load_model(self) -> None: ...

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        req_ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(req_ids, [[0] for _ in req_ids])

    def shutdown(self) -> None: ...


def make_step(batch: int) -> SchedulerOutput:
    """A decode step as the scheduler makes it; every 16th request takes a block."""
    req_ids = [f"{index}-{index:032d}" for index in range(batch)]
    cached = CachedRequestData(
        req_ids=req_ids,
        new_block_ids=[([i],) if i % 16 == 0 else None for i in range(batch)],
        num_computed_tokens=[500 + i for i in range(batch)],
        num_output_tokens=[100 + i for i in range(batch)],
    )
    step = SchedulerOutput([], cached, dict.fromkeys(req_ids, 1), batch)
    step.sampling_req_ids = set(req_ids)
    step.decode_set_id = 1
    return step


def run(executor: Executor, step: SchedulerOutput, num_steps: int, in_flight: int) -> None:
    pending: deque[Future[ModelRunnerOutput]] = deque()
    for _ in range(num_steps):
        pending.append(executor.execute_model(step))
        if len(pending) == in_flight:
            pending.popleft().result()
    while pending:
        pending.popleft().result()


def measure(executor: Executor, batch: int, num_rounds: int, num_steps: int) -> list[list[float]]:
    """Seconds per step: CPU of this thread, wall with one and with two steps in flight."""
    step, rounds = make_step(batch), []
    run(executor, step, num_steps, 2)
    for _ in range(num_rounds):
        figures = []
        for clock, in_flight in (
            (time.thread_time, 1),
            (time.perf_counter, 1),
            (time.perf_counter, 2),
        ):
            start = clock()
            run(executor, step, num_steps, in_flight)
            figures.append((clock() - start) / num_steps)
        rounds.append(figures)
    return [list(column) for column in zip(*rounds, strict=True)]


def executors(batch: int) -> dict[str, Callable[[], Executor]]:
    def mp(size: int) -> Callable[[], Executor]:
        def make() -> Executor:
            config = make_config(batch, 1024)
            config.parallel_config.tensor_parallel_size = size
            return MultiprocExecutor(config)

        return make

    return {
        "uni": lambda: UniProcExecutor(make_config(batch, 1024)),
        **{f"mp {size}": mp(size) for size in (1, 2, 4)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256, help="running requests")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100, help="steps per round")
    args = parser.parse_args()
    stand_in: Any = NoWorker
    uniproc.Worker = worker.Worker = stand_in  # type: ignore[misc]
    print(f"batch {args.batch}, microseconds per decode step (best, median)")
    print(f"{'':<8}{'core CPU':>16}{'alone':>16}{'two in flight':>16}")
    for name, make in executors(args.batch).items():
        executor = make()
        columns = measure(executor, args.batch, args.rounds, args.steps)
        executor.shutdown()
        figures = (f"{min(c) * 1e6:8.0f}{median(c) * 1e6:8.0f}" for c in columns)
        print(f"{name:<8}" + "".join(figures), flush=True)


if __name__ == "__main__":
    main()
