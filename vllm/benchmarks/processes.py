# SPDX-License-Identifier: Apache-2.0
"""A load shared among processes, which one event loop could not carry.

Every request keeps the time that the arrival process of the whole load gave it, and every process
counts from the same moment, so the processes together are the one client that was asked for.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vllm import decisions
from vllm.benchmarks.client import RequestOptions
from vllm.benchmarks.client_process import ShareReport, run_share
from vllm.benchmarks.client_usage import ClientUsage
from vllm.benchmarks.load import Share
from vllm.benchmarks.outcome import Outcome, Sample
from vllm.entrypoints.cli.types import CommandError

#: Tokens of all streams come at once, at the end of a step; a process reads them one by one, some
#: 10 µs each. With this many streams the last one is seen within a millisecond.
STREAMS_PER_PROCESS = 64
#: about a fifth of what one process can read
TOKENS_PER_S_PER_PROCESS = 10_000
#: from the last process being ready to the first request
_LEAD_S = 0.05


@dataclass(frozen=True)
class LoadPlan:
    """All requests: `samples[i]` is sent `times_s[i]` seconds after the start (ascending, `[n]`),
    later only while `max_concurrency` are in flight. `backend` is a key of `DIALECTS`; `verify`
    says whether a server's certificate must be a trusted one.
    """

    backend: str
    options: RequestOptions
    samples: Sequence[Sample]
    times_s: NDArray[np.float64]
    max_concurrency: int | None = None
    verify: bool = True


@dataclass(frozen=True)
class LoadResult:
    """Outcomes in the order of the samples, seconds from the start to the end of the last one, and
    what each process took."""

    outcomes: list[Outcome]
    duration_s: float
    clients: list[ClientUsage]


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_num_processes(
    num_requests: int,
    max_concurrency: int | None,
    request_rate: float,
    mean_output_len: float,
    num_cores: int,
) -> tuple[int, str]:
    """How many processes a load needs, and why.

    One per 64 streams in flight or, where a finite rate bounds it lower, per 10,000 tokens per
    second; half of the cores are left to a server on the same machine.
    """
    streams = min(num_requests, max_concurrency or num_requests)
    wanted, why = math.ceil(streams / STREAMS_PER_PROCESS), f"up to {streams} streams at once"
    if math.isfinite(request_rate):
        tokens_per_s = request_rate * mean_output_len
        by_rate = math.ceil(tokens_per_s / TOKENS_PER_S_PER_PROCESS)
        if by_rate < wanted:
            wanted, why = by_rate, f"{tokens_per_s:.0f} tokens/s at most"
    room = max(1, num_cores // 2)
    if wanted > room:
        return room, f"{why}, half of {num_cores} cores"
    return max(1, wanted), why


def decide_num_processes(asked: int | None, load: LoadPlan, request_rate: float) -> int:
    """`asked`, or what the load needs, recorded as a decision; one slot or request at least each.

    Raises `CommandError` when more processes are asked for than can have something to do.
    """
    streams = min(len(load.samples), load.max_concurrency or len(load.samples))
    if asked is not None:
        if asked > streams:
            raise CommandError(
                f"--client-processes {asked}: there are only {streams} requests in flight to share"
            )
        return asked
    mean_output_len = sum(sample.output_len for sample in load.samples) / len(load.samples)
    number, why = choose_num_processes(
        len(load.samples), load.max_concurrency, request_rate, mean_output_len, num_usable_cores()
    )
    decisions.record("client processes", number, why)
    return number


def partition(load: LoadPlan, num_processes: int) -> list[Share]:
    """Requests and slots of each process.

    Slots of `max_concurrency` are dealt one by one, so that they sum to it, and requests to slots,
    so that a process gets as many requests as its slots will carry.
    """
    slots = load.max_concurrency or num_processes
    owners = [(index % slots) % num_processes for index in range(len(load.samples))]
    shares = []
    for process in range(num_processes):
        indices = [index for index, owner in enumerate(owners) if owner == process]
        limit = len(range(process, slots, num_processes)) if load.max_concurrency else None
        shares.append(
            Share(
                [load.samples[index] for index in indices],
                [float(load.times_s[index]) for index in indices],
                indices,
                limit,
            )
        )
    return shares


def run_load(load: LoadPlan, num_processes: int, show_progress: bool = True) -> LoadResult:
    """Send everything from `num_processes` processes.

    Raises `CommandError` when a process ends early; none is left behind.
    """
    shares = partition(load, num_processes)
    spawn = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    try:
        for share in shares:
            ours, theirs = spawn.Pipe()
            job = (load.backend, load.options, share, load.verify)
            process = spawn.Process(target=run_share, args=(theirs, *job), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for number, pipe in enumerate(pipes):
            _receive(pipe, processes[number])
        epoch = time.perf_counter() + _LEAD_S
        for pipe in pipes:
            pipe.send(epoch)
        return _collect(load, shares, processes, pipes, show_progress)
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()


def _collect(
    load: LoadPlan,
    shares: Sequence[Share],
    processes: Sequence[SpawnProcess],
    pipes: Sequence[Connection],
    show_progress: bool,
) -> LoadResult:
    total = len(load.samples)
    reports: dict[int, ShareReport] = {}
    with tqdm(total=total, unit="req", disable=not show_progress, dynamic_ncols=True) as bar:
        while len(reports) < len(pipes):
            pending = [pipe for number, pipe in enumerate(pipes) if number not in reports]
            for pipe in wait(pending):
                assert isinstance(pipe, Connection)
                number = pipes.index(pipe)
                message = _receive(pipe, processes[number])
                if isinstance(message, ShareReport):
                    reports[number] = message
                else:
                    assert isinstance(message, int)
                    bar.update(message)
    by_index = {
        index: outcome
        for number, share in enumerate(shares)
        for index, outcome in zip(share.indices, reports[number].outcomes, strict=True)
    }
    return LoadResult(
        [by_index[index] for index in range(total)],
        max(report.end_s for report in reports.values()),
        [reports[number].usage for number in range(len(pipes))],
    )


def _receive(pipe: Connection, process: SpawnProcess) -> object:
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        raise CommandError(
            f"a client process ended early, with exit status {process.exitcode}"
        ) from None
