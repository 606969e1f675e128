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
from vllm.v1.executor.device_checks import check_equal_devices
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
    alone = SimpleNamespace(replicas_share_experts=False)
    return UniProcExecutor(SimpleNamespace(parallel_config=alone))  # type: ignore[arg-type]


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


def test_a_call_that_takes_longer_than_its_timeout_is_named(executor: UniProcExecutor) -> None:
    """And not one whose method gives up by itself."""
    worker: Any = executor.worker

    def wait(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method == "give_up":
            raise TimeoutError("nobody came")
        worker.released.wait(60)

    worker.call = wait
    with pytest.raises(TimeoutError, match="^nobody came$"):
        executor.collective_rpc("give_up", timeout=60)
    with pytest.raises(TimeoutError, match=r"the call of wait has not ended after 0\.01 s"):
        executor.collective_rpc("wait", timeout=0.01)
    worker.released.set()
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


def _show_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    platform = type(current_platform)
    monkeypatch.setattr(platform, "device_count", lambda self: len(names))
    monkeypatch.setattr(platform, "get_device_name", lambda self, device_id=0: names[device_id])


def test_workers_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    _show_gpus(monkeypatch, "H200", "H200", "H200")
    for field in ("tensor_parallel_size", "pipeline_parallel_size"):
        assert Executor.get_class(config_of("cuda", **{field: 3})) is MultiprocExecutor
        flag = "--" + field.replace("_", "-")
        with pytest.raises(ValueError, match=f"{flag} 4 needs 4 GPUs, .* and 3 are visible"):
            Executor.get_class(config_of("cuda", **{field: 4}))
    both = config_of("cuda", tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="size 2 with --pipeline-parallel-size 2 needs 4 GPUs"):
        Executor.get_class(both)


def test_hosts_need_the_gpus_of_their_own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    _show_gpus(monkeypatch, "H200", "H200")
    both = {"tensor_parallel_size": 4, "nnodes": 2}
    assert Executor.get_class(config_of("cuda", **both)) is MultiprocExecutor
    with pytest.raises(ValueError, match="size 6 with --nnodes 2 needs 3 GPUs, .* and 2 are"):
        Executor.get_class(config_of("cuda", **both | {"tensor_parallel_size": 6}))
    with pytest.raises(ValueError, match="--node-rank 1: the API and the engine are on node 0"):
        Executor.get_class(config_of("cpu", **both, node_rank=1))
    with pytest.raises(ValueError, match="GPUs that share layers.*H200, H200, H200, L4"):
        check_equal_devices(["L4"] * 4 + ["H200"] * 3 + ["L4"], 4)


def test_gpus_that_share_layers_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    _show_gpus(monkeypatch, "H200", "H200", "L4", "L4")
    with pytest.raises(ValueError, match="size 4: GPUs that share layers.*H200, H200, L4, L4"):
        Executor.get_class(config_of("cuda", tensor_parallel_size=4))
    for sizes in ((2, 2), (1, 4)):
        parallel = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
        assert Executor.get_class(config_of("cuda", **parallel)) is MultiprocExecutor


@pytest.mark.parametrize(
    ("device", "ranks", "asked", "expected"),
    [("cpu", 2, None, 300), ("cuda", 1, None, 300), ("cuda", 2, None, 20), ("cuda", 2, "90", 90)],
)
def test_how_long_a_step_may_take(
    device: str, ranks: int, asked: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uniproc, "Worker", _Worker)
    if asked is not None:
        monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", asked)
    executor = UniProcExecutor(config_of(device, tensor_parallel_size=ranks))
    assert executor.step_timeout_s == expected
    assert f"after {expected} s" in str(executor.overdue())
    executor.shutdown()
