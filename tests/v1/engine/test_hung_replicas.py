# SPDX-License-Identifier: Apache-2.0
"""Replicas that share experts, one of which does not come to what all do together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.v1.executor.fake_worker import gone
from tests.v1.executor.hangs import (
    END_S,
    compute,
    descendants,
    end_cores,
    engines,
    lie_down,
    sleep_long,
)
from tests.v1.executor.quick_clock import LIMIT_S, use_quick_clock
from vllm import LLM
from vllm.distributed.parallel_state import get_world_group
from vllm.exceptions import HangError
from vllm.v1.engine.joint_steps import JointSteps
from vllm.v1.worker.worker import Worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forking"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="replicas on CPUs"),
]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    use_quick_clock(monkeypatch)
    shared = {"data_parallel_size": 2, "enable_expert_parallel": True}
    with engines("qwen3_5_moe", max_num_batched_tokens=64, **shared) as make:
        yield make


def meet(worker: Worker, late: Callable[[], None] | None = None) -> int:
    group = get_world_group()
    if group.is_last_rank and late is not None:
        late()
    group.barrier()
    return os.getpid()


def compute_long() -> None:
    compute(3 * LIMIT_S)


@pytest.mark.parametrize(("late", "ranks"), [(lie_down, 1), (sleep_long, 1), (sleep_long, 2)])
def test_a_worker_of_one_replica_that_does_not_come(start: Any, late: Any, ranks: int) -> None:
    before = descendants()
    llm = start(tensor_parallel_size=ranks)
    own = descendants() - before
    assert len(set(llm.collective_rpc(meet))) == 2 * ranks
    began = time.monotonic()
    with pytest.raises(Exception, match="go(es)? on, for 3 s: .*waits for barrier of ranks 0, 1"):
        llm.collective_rpc(meet, args=(late,))
    end_cores(llm)
    assert gone(list(own)) and time.monotonic() - began < END_S


def test_a_replica_that_is_stopped_while_none_waits_in_a_collective(start: Any) -> None:
    """Only the front end waits for its answer."""
    before = descendants()
    llm = start()
    own = descendants() - before

    def stop(worker: Worker) -> None:
        if get_world_group().is_last_rank:
            lie_down()

    began = time.monotonic()
    with pytest.raises(Exception, match="replica 1 does not go on, for 3 s: replica 0: "):
        llm.collective_rpc(stop)
    end_cores(llm)
    assert gone(list(own)) and time.monotonic() - began < END_S


def test_a_worker_of_one_replica_that_is_slow(start: Any) -> None:
    llm = start()
    assert len(set(llm.collective_rpc(meet, args=(compute_long,)))) == 2


@pytest.mark.parametrize("late", [sleep_long, lie_down])
@pytest.mark.parametrize("place", [(Worker, "_share_threads"), (JointSteps, "least")])
def test_a_replica_that_does_not_come_to_the_start(
    start: Any, late: Any, place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where the ranks meet nor where cores agree on their memory."""
    kind, name = place
    method = getattr(kind, name)

    def late_method(self: Any, *args: Any) -> Any:
        rank = self.parallel_config.data_parallel_rank if kind is Worker else 1 - min(self._links)
        if rank == 1:
            late()
        return method(self, *args)

    monkeypatch.setattr(kind, name, late_method)
    before, began = descendants(), time.monotonic()
    with pytest.raises(HangError, match="go(es)? on, for 3 s: .* waits for "):
        start()
    assert gone(list(descendants() - before)) and time.monotonic() - began < END_S
