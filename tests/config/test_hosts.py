# SPDX-License-Identifier: Apache-2.0
"""Several hosts, and Ray: what the parallel configuration makes of their flags."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.config import ParallelConfig
from vllm.config import parallel as module
from vllm.exceptions import VLLMValidationError


@pytest.fixture
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: object())


def test_hosts_share_the_workers() -> None:
    config = ParallelConfig(tensor_parallel_size=4, pipeline_parallel_size=2, nnodes=4, node_rank=3)
    assert (config.world_size, config.local_world_size) == (8, 2)
    assert config.executor_backend == "mp"
    assert config.hosts_timeout_s == 300
    assert ParallelConfig(distributed_timeout_seconds=7).hosts_timeout_s == 7
    one_replica = {"data_parallel_size": 2, "asked_data_parallel_rank": 1}
    assert ParallelConfig(tensor_parallel_size=2, nnodes=2, **one_replica).local_world_size == 1


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (1, "--node-rank 3 is one of several hosts, and --nnodes is 1; add --nnodes N"),
        (2, "--node-rank 3 with --nnodes 2: must be 0 to 1"),
    ],
)
def test_a_host_that_is_none_of_them(nodes: int, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as caught:
        ParallelConfig(tensor_parallel_size=2, nnodes=nodes, node_rank=3)
    assert caught.value.parameter == "node_rank"


@pytest.mark.parametrize("seconds", [0, -3])
def test_waiting_takes_time(seconds: int) -> None:
    """0 is not "no limit", nor the default."""
    with pytest.raises(VLLMValidationError, match="--distributed-timeout-seconds.*greater than 0"):
        ParallelConfig(distributed_timeout_seconds=seconds)


def test_ray_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(VLLMValidationError, match=r"pip install vllm\[ray\]; or use mp"):
        ParallelConfig(distributed_executor_backend="ray")


@pytest.mark.usefixtures("with_ray")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"nnodes": 2}, "--nnodes 2 with --distributed-executor-backend ray: Ray chooses"),
        ({"data_parallel_size": 2}, "backend ray with 2 replicas: .*--data-parallel-rank"),
    ],
)
def test_what_ray_does_not_do(flags: dict[str, Any], words: str) -> None:
    ray = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}
    assert ParallelConfig(**ray).executor_backend == "ray"
    with pytest.raises(VLLMValidationError, match=words):
        ParallelConfig(**ray, **flags)
