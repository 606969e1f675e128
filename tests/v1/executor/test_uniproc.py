# SPDX-License-Identifier: Apache-2.0
"""Order, overlap, remote calls and shutdown of the in-process executor."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import ParallelConfig
from vllm.platforms import current_platform
from vllm.v1.executor import uniproc
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.uniproc import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


class _Output(AsyncModelRunnerOutput):
    def __init__(self, step: int, released: threading.Event) -> None:
        self.step, self.released = step, released

    def get_output(self) -> ModelRunnerOutput:
        assert self.released.wait(60)
        return ModelRunnerOutput([str(self.step)], [[self.step]])


class _Worker:
    def __init__(self, config: Any, receive_masks: Any) -> None:
        self.launched: list[int] = []
        self.released = threading.Event()
        self.stopped = 0

    def init_device(self) -> None: ...

    def load_model(self) -> None: ...

    def execute_model(self, step: int) -> _Output:
        self.launched.append(step)
        return _Output(step, self.released)

    def call(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return method, args, kwargs, threading.current_thread().name

    def shutdown(self) -> None:
        self.stopped += 1


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> UniProcExecutor:
    monkeypatch.setattr(uniproc, "Worker", _Worker)
    return UniProcExecutor(SimpleNamespace())  # type: ignore[arg-type]


def test_a_step_is_launched_while_the_one_before_still_runs(executor: UniProcExecutor) -> None:
    worker: Any = executor.worker
    futures = [executor.execute_model(step) for step in range(3)]  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    while len(worker.launched) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert worker.launched == [0, 1, 2]
    assert not any(future.done() for future in futures)
    worker.released.set()
    assert [future.result(60).sampled_token_ids for future in futures] == [[[0]], [[1]], [[2]]]
    executor.shutdown()


def test_calls_run_on_the_launching_thread(executor: UniProcExecutor) -> None:
    method, args, kwargs, thread = executor.collective_rpc("name", args=(1,), kwargs={"a": 2})[0]
    assert (method, args, kwargs) == ("name", (1,), {"a": 2})
    assert thread.startswith("launch")
    executor.shutdown()


def test_shutdown_happens_once_and_also_after_the_pools_are_closed(
    executor: UniProcExecutor,
) -> None:
    worker: Any = executor.worker
    executor.check_health()
    executor._launcher.shutdown()
    executor.shutdown()
    executor.shutdown()
    assert worker.stopped == 1
    with pytest.raises(RuntimeError, match="shut down"):
        executor.check_health()


def config_of(device: str, **parallel: Any) -> Any:
    return SimpleNamespace(
        parallel_config=ParallelConfig(**parallel),
        device_config=SimpleNamespace(device_type=device),
    )


def test_one_worker_needs_no_process() -> None:
    for device in ("cpu", "cuda"):
        assert Executor.get_class(config_of(device)) is UniProcExecutor
    assert Executor.get_class(config_of("cpu", tensor_parallel_size=2)) is MultiprocExecutor
    assert Executor.get_class(config_of("cuda", distributed_executor_backend="mp")) is (
        MultiprocExecutor
    )


def test_several_gpus_only_as_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="use one GPU, --pipeline-parallel-size, or a CPU with"):
        Executor.get_class(config_of("cuda", tensor_parallel_size=2))
    monkeypatch.setattr(type(current_platform), "device_count", lambda self: 2)
    staged = config_of("cuda", pipeline_parallel_size=2)
    assert Executor.get_class(staged) is MultiprocExecutor
    with pytest.raises(ValueError, match="size 3 needs as many GPUs, this host shows 2"):
        Executor.get_class(config_of("cuda", pipeline_parallel_size=3))
