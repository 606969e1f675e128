# SPDX-License-Identifier: Apache-2.0
"""The steps of a model whose layers several ranks share, or have one after the other.

Every rank is a worker in a process of its own, as in an engine, and runs the same steps with the
same questions asked: on a CPU captured by recording, its collectives as well, on a GPU in graphs.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vllm.compilation.graph_safety.device.checks import LONG_RUN, check_built, check_sizes
from vllm.compilation.graph_safety.device.run import DeviceRun
from vllm.compilation.graph_safety.report import Captured
from vllm.compilation.graph_safety.simulator.functions import REPLAYED
from vllm.compilation.graph_safety.simulator.models import check_runner
from vllm.compilation.graph_safety.source_pass import that_travels
from vllm.compilation.graph_safety.walker import Finding
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.station import WorkerDiedError
from vllm.v1.structured_output.masks import MaskQueue
from vllm.v1.worker.worker import Worker

logger = init_logger(__name__)

Progress = Callable[[str], None]
#: how often the first rank is asked how far it is
_LOOKS_EVERY_S = 0.1
#: what fails here may come from the death of another rank, which is then seen this soon
_BLAME_S = 1.0
#: files of a check: what the first rank writes to, and what one that fails leaves
_STEPS, _FAILED = "steps", "failed-"
_ALONE = "; each stage alone, with made-up streams in the place of those of the stage before"


@dataclass(frozen=True)
class RankFound:
    """What was found on a rank, what ran there, in words, and what became of its captures."""

    findings: tuple[Finding, ...]
    done: str
    results: tuple[Captured, ...]


@dataclass(frozen=True)
class RanksReport:
    """Of each rank, in their order. `alone`: they are pipeline stages, that ran their steps without
    the others."""

    ranks: tuple[RankFound, ...]
    alone: bool = False

    @property
    def modes(self) -> dict[Finding, str]:
        """Each finding once, with the ranks that have it."""
        found = dict.fromkeys(one for rank in self.ranks for one in rank.findings)
        return {one: f"{REPLAYED} on {self._those(_finds(one))}" for one in found}

    def _those(self, which: Callable[[RankFound], bool]) -> str:
        own = [str(number) for number, rank in enumerate(self.ranks) if which(rank)]
        if len(own) == len(self.ranks):
            return f"each of {len(own)} ranks"
        return f"rank{'s' * (len(own) > 1)} {', '.join(own)}"

    @property
    def results(self) -> tuple[Captured, ...]:
        return tuple(
            replace(one, name=f"rank {number}: {one.name}")
            for number, rank in enumerate(self.ranks)
            for one in rank.results
        )

    @property
    def summary(self) -> str:
        done = dict.fromkeys(rank.done for rank in self.ranks)
        said = "; ".join(f"on {self._those(_did(one))}: {one}" for one in done)
        return said + (_ALONE if self.alone else "")


def _finds(finding: Finding) -> Callable[[RankFound], bool]:
    return lambda rank: finding in rank.findings


def _did(done: str) -> Callable[[RankFound], bool]:
    return lambda rank: rank.done == done


def check_ranks(
    vllm_config: VllmConfig,
    steps: int,
    progress: Progress = lambda name: None,
    own_sizes: VllmConfig | None = None,
) -> RanksReport:
    """Check `steps` steps (on GPUs `LONG_RUN` at least) on every rank of a configuration; on GPUs
    capture every graph of `own_sizes` besides. `load_format` "dummy" makes weights up.

    Raises ValueError for what an engine refuses, what a rank raised, WorkerDiedError for one that
    died.
    """
    executor = Executor.get_class(vllm_config)(vllm_config)
    try:
        ranks = _asked(executor, (steps, own_sizes), progress)
    finally:
        executor.shutdown()
    return RanksReport(tuple(ranks), vllm_config.parallel_config.pipeline_parallel_size > 1)


def _asked(
    executor: Executor, args: tuple[int, VllmConfig | None], progress: Progress
) -> list[RankFound]:
    """What every rank answers. In a folder the first one adds a byte to a file for each step, and
    one that fails leaves what it raised."""
    with tempfile.TemporaryDirectory(prefix="vllm-graph-check-") as name:
        folder = Path(name)
        (folder / _STEPS).touch()
        # A thread that waits, and ends with the executor, whatever ends this one.
        waiting = ThreadPoolExecutor(1)
        answers = waiting.submit(executor.collective_rpc, check_rank, None, (name, *args))
        waiting.shutdown(wait=False)
        told, over = 0, False
        while not over:
            over = bool(wait([answers], _LOOKS_EVERY_S).done)
            now = (folder / _STEPS).stat().st_size
            for _ in range(now - told):
                progress("step")
            told = now
        try:
            return answers.result()
        except Exception as error:
            if isinstance(error, WorkerDiedError) and error.was_killed:
                raise
            for first in sorted(folder.glob(f"{_FAILED}*"), key=lambda one: one.stat().st_mtime_ns):
                cause: Exception = pickle.loads(first.read_bytes())
                raise cause from None
            raise


def check_rank(worker: Worker, folder: str, steps: int, own_sizes: VllmConfig | None) -> RankFound:
    """On the worker of a rank, while those of the others do the same. One that fails ends its
    process, for the others wait for its part of a collective: with it the executor ends them."""
    with open(Path(folder, _STEPS), "ab", buffering=0) as told:

        def progress(name: str) -> None:
            if worker.rank == 0:
                told.write(b".")

        try:
            with torch.no_grad():
                if worker.device.type == "cuda":
                    return _on_gpu(worker, max(steps, LONG_RUN), own_sizes, progress)
                return _on_cpu(worker, steps, progress)
        except Exception as error:
            logger.exception("the check of rank %d failed", worker.rank)
            unfinished = Path(folder, f"rank-{worker.rank}")
            unfinished.write_bytes(pickle.dumps(_named(worker.rank, error)))
            unfinished.rename(Path(folder, f"{_FAILED}{worker.rank}"))
            time.sleep(_BLAME_S)
            os._exit(1)


def _named(rank: int, error: Exception) -> Exception:
    if isinstance(error, ValueError | torch.cuda.OutOfMemoryError):
        return that_travels(error)
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")


def _on_cpu(worker: Worker, steps: int, progress: Progress) -> RankFound:
    runner, masks = worker.model_runner, MaskQueue()
    runner.receive_masks = masks.receive
    report = check_runner(runner, steps, progress, masks=masks)
    return RankFound(report.findings, report.summary, report.results)


def _on_gpu(
    worker: Worker, steps: int, own_sizes: VllmConfig | None, progress: Progress
) -> RankFound:
    run = DeviceRun()
    worker.await_kernels()
    check_built(worker.model_runner, run, steps, progress)
    worker.model_runner.close()
    if own_sizes is not None and get_world_group().all_agree(not run.findings):
        own_sizes.parallel_config.rank = worker.rank
        check_sizes(own_sizes, worker.device, run)
    done = f"on a GPU: {'; '.join(run.done)}"
    return RankFound(tuple(run.findings), done, tuple(run.results))
