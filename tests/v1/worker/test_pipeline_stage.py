# SPDX-License-Identifier: Apache-2.0
"""What stages exchange, over channels in memory: what crosses, and when samples are taken in."""

from __future__ import annotations

import itertools
import threading
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm.sequence import IntermediateTensors
from vllm.v1.worker import pipeline_stage
from vllm.v1.worker.input_batch import StepOrder
from vllm.v1.worker.pipeline_stage import PipelineStage

TOKENS, HIDDEN, ROWS, DEPTH = 8, 4, 6, 3


class Channels:
    """One group, as each of its processes sees it; messages are copies in queues."""

    def __init__(self, size: int) -> None:
        self.size = size
        # all at once: a missing one could be made by both ends, each its own
        self.queues: dict[tuple[int, int], Queue[Tensor]] = {
            ends: Queue() for ends in itertools.product(range(size), repeat=2)
        }

    def end(self, rank: int) -> Any:
        def isend(x: Tensor, target: int) -> Any:
            self.queues[rank, target].put(x.clone())
            return SimpleNamespace(wait=lambda: None)

        def irecv(x: Tensor, source: int) -> Any:
            return SimpleNamespace(wait=lambda: x.copy_(self.queues[source, rank].get(timeout=30)))

        return SimpleNamespace(
            rank_in_group=rank,
            world_size=self.size,
            is_first_rank=rank == 0,
            is_last_rank=rank == self.size - 1,
            isend=isend,
            irecv=irecv,
        )


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[PipelineStage]:
    """Three of them; one stream is captured by the first, another by the second."""
    forward, back, own = Channels(3), Channels(3), threading.local()
    monkeypatch.setattr(pipeline_stage, "get_pp_group", lambda: forward.end(own.rank))
    monkeypatch.setattr(pipeline_stage, "get_pp_back_group", lambda: back.end(own.rank))
    made: dict[int, PipelineStage] = {}

    def make(rank: int) -> None:
        own.rank = rank
        made[rank] = PipelineStage(
            (TOKENS, HIDDEN), torch.float32, torch.device("cpu"), ROWS, DEPTH, 1 + rank, 2 + rank
        )

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(queue.qsize() for group in (forward, back) for queue in group.queues.values())
    return [made[rank] for rank in range(3)]


def order(*rows: int, sampling: tuple[int, ...] | None = None) -> StepOrder:
    nothing = np.zeros(len(rows), dtype=np.int64)
    chosen = np.array(range(len(rows)) if sampling is None else sampling, dtype=np.int64)
    array = np.array(rows, dtype=np.int64)
    return StepOrder([], [], array, nothing, nothing, nothing, len(rows), chosen)


class Accepted(list[tuple[list[int], list[int]]]):
    def __call__(self, sample_requests: Tensor, sampled: Tensor) -> None:
        self.append((sample_requests[:, 0].tolist(), sampled.tolist()))


def requests(*rows: int) -> Tensor:
    return torch.tensor([[row, i, 1, 0] for i, row in enumerate(rows)], dtype=torch.int32)


def test_streams_cross_in_order(stages: list[PipelineStage]) -> None:
    first, second, third = stages
    assert first.incoming(3) is None
    for step in range(2 * DEPTH):
        hidden = torch.full((3, HIDDEN), float(step))
        output = IntermediateTensors({"hidden_states": hidden, "captured.0": hidden + 0.25})
        first.send(first.packed(output))
        hidden.fill_(-1.0)  # the next step writes it
        second.receive(3)
        found = second.incoming(5)
        assert found is not None and len(found) == 2 and found["hidden_states"].shape == (5, HIDDEN)
        assert (found["hidden_states"][:3] == step).all()
        assert (found["captured.0"][:3] == step + 0.25).all()
        assert all(one.is_contiguous() for one in found.tensors.values())
        more = IntermediateTensors({**found.tensors, "captured.1": found["captured.0"] + 0.25})
        second.send(second.packed(more)[:3])
        third.receive(3)
        last = third.incoming(3)
        assert last is not None and (last["captured.1"] == step + 0.5).all()


def test_a_stage_that_captures_nothing_sends_one_stream() -> None:
    packed = PipelineStage.packed(IntermediateTensors({"hidden_states": torch.ones(2, HIDDEN)}))
    assert packed.shape == (2, 1, HIDDEN)


def test_samples_are_taken_in_when_a_row_runs_again(stages: list[PipelineStage]) -> None:
    first, last = stages[0], stages[2]
    accepted = Accepted()
    table = requests(0, 1)
    first.await_sampled(order(0, 1), table, accepted)
    table.zero_()  # the next step fills the same array
    first.await_sampled(order(2, 3, sampling=(1,)), requests(3), accepted)
    first.take_sampled(order(4), accepted)
    first.take_sampled(order(2), accepted)  # it did not sample
    assert accepted == []
    last.send_sampled(torch.tensor([50, 51]))
    last.send_sampled(torch.tensor([53]))
    first.take_sampled(order(3), accepted)
    # Those of the step before come first, and so are taken in, too.
    assert accepted == [([0, 1], [50, 51]), ([3], [53])]
    first.take_sampled(order(0, 1, 2, 3), accepted)
    assert len(accepted) == 2


def test_samples_that_the_host_has_are_taken_in(stages: list[PipelineStage]) -> None:
    """So that nothing piles up for rows that never run again."""
    first, last = stages[0], stages[2]
    accepted = Accepted()
    for step in range(10):
        first.take_sampled(order(5), accepted)
        assert len(accepted) == max(0, step - DEPTH + 1)
        first.await_sampled(order(step % 4), requests(step % 4), accepted)
        last.send_sampled(torch.tensor([step]))
    assert [sampled for _, sampled in accepted] == [[step] for step in range(len(accepted))]


def test_every_earlier_stage_gets_the_samples(stages: list[PipelineStage]) -> None:
    stages[2].send_sampled(torch.tensor([7]))
    for stage in stages[:2]:
        accepted = Accepted()
        stage.await_sampled(order(1), requests(1), accepted)
        stage.take_sampled(order(1), accepted)
        assert accepted == [([1], [7])]


def test_made_up_steps_concern_nobody_else(stages: list[PipelineStage]) -> None:
    """Nothing is sent, and nothing is waited for: samples are 0."""
    for stage in stages:
        with stage.alone():
            stage.receive(3)
            if stage.is_last:
                stage.send_sampled(torch.tensor([9]))
                continue
            stage.send(torch.ones(3, 2 + stage.rank, HIDDEN))
            accepted = Accepted()
            stage.take_sampled(order(0, 1), accepted)
            stage.await_sampled(order(0, 1), requests(0, 1), accepted)
            assert accepted == [([0, 1], [0, 0])]
    test_streams_cross_in_order(stages)
