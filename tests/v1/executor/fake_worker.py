# SPDX-License-Identifier: Apache-2.0
"""A worker without model and device, for tests of how workers are reached and how they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

from vllm import decisions
from vllm.exceptions import VLLMValidationError
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.structured_output.mask_words import FilledMasks

#: from a death to the end of all processes
END_S = 5.0


class Launched(AsyncModelRunnerOutput):
    """A step that the device finishes later."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        time.sleep(0.02)
        return self.output


class FakeWorker:
    """Computes `(rank, step, masks)`; a step is `(number, what to do)`.

    From the configuration's `additional_config`: `fails`, the rank whose start fails, or "never"
    for one that never ends; `farewell`, a directory for a file per worker that says goodbye.
    """

    def __init__(
        self, config: Any, local_rank: int, rank: int, init_method: str, receive_masks: Any
    ) -> None:
        self.rank, self.local_rank, self.receive_masks = rank, local_rank, receive_masks
        self.fails = config.additional_config.get("fails")
        self.farewell = config.additional_config.get("farewell")
        self.steps: list[int] = []

    def init_device(self) -> None:
        decisions.record("a choice of the worker", self.rank, "only rank 0 tells")

    def load_model(self) -> None:
        if self.fails == "never":
            time.sleep(600)
        if self.fails == self.rank:
            raise VLLMValidationError("the checkpoint is not there", "model")

    def execute_model(self, step: tuple[int, str]) -> Any:
        number, action = step
        self.steps.append(number)
        if action == f"fail {self.rank}":
            raise RuntimeError(f"rank {self.rank} cannot")
        if action == f"die {self.rank}":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "hang":
            time.sleep(600)
        masks = self.receive_masks().words.tolist() if action == "masks" else []
        reports = KVConnectorOutput(finished_sending={f"r{number}"})
        output = ModelRunnerOutput([str(self.rank)], [[number], masks], {}, {}, reports)
        return Launched(output) if number % 2 else output

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        return getattr(self, method)(*args, **kwargs) if isinstance(method, str) else method(self)

    def pid(self) -> int:
        return os.getpid()

    def place(self) -> tuple[int, int]:
        return self.rank, self.local_rank

    def echo(self, content: bytes) -> bytes:
        return content

    def refuse(self) -> None:
        if self.rank == 1:
            raise VLLMValidationError("not me", "method", "refuse")

    def shutdown(self) -> None:
        if self.farewell is not None:
            Path(self.farewell, str(self.rank)).touch()


def config_of(output_rank: int = 0, kv_transfer_config: Any = None, **changes: Any) -> Any:
    """`changes`: what the workers do, see `FakeWorker`."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=2, output_rank=output_rank, nnodes=1, replicas_share_experts=False
        ),
        load_config=SimpleNamespace(use_tqdm_on_load=True),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        decisions=decisions.DecisionLog(),
        kv_transfer_config=kv_transfer_config,
        additional_config=changes,
    )


def processes(executor: Executor) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in executor.collective_rpc("pid")]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def gone(workers: list[psutil.Process]) -> bool:
    """Looks only: waiting for them is the executor's."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        if not any(map(_runs, workers)):
            return True
        time.sleep(0.02)
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until workers have read what they were sent."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def filled(word: int) -> FilledMasks:
    """Of one request."""
    return FilledMasks(np.array([[word]], dtype=np.int32), [1])


def step(executor: Executor, number: int, action: str = "") -> Any:
    return executor.execute_model((number, action))  # type: ignore[arg-type]
