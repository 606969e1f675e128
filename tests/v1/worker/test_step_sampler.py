# SPDX-License-Identifier: Apache-2.0
"""What sampling keeps of requests between steps, and when it forgets it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vllm.decisions import DecisionLog
from vllm.distributed.parallel_state import as_first_rank_of
from vllm.kernels.step import Progress
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker import step_sampler
from vllm.v1.worker.input_batch import InputBatch, StepOrder
from vllm.v1.worker.step_sampler import StepSampler

VOCAB, CPU = 8, torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
#: of three requests, the second may only give 5
PARAMS = {"a": GREEDY, "b": SamplingParams(temperature=0.0, logit_bias={5: 50.0}), "c": GREEDY}


class Steps:
    """A batch and its sampler, with logits that favour token 1."""

    def __init__(self) -> None:
        self.batch = InputBatch(4)
        self.sampler = StepSampler(VOCAB, CPU, Progress.create(4, 1, CPU))
        for req_id, params in PARAMS.items():
            self.add(req_id, params)

    def add(self, req_id: str, params: SamplingParams) -> None:
        self.sampler.add(self.batch.add(req_id, [3, 4], 2, params, 0))

    def remove(self, req_id: str) -> None:
        self.batch.remove(req_id)
        self.sampler.remove(req_id)

    def order(self, scheduled: str, sampling: str) -> StepOrder:
        return self.batch.order(dict.fromkeys(scheduled, 2), set(sampling))

    def sample(self, scheduled: str, sampling: str) -> list[int] | None:
        order = self.order(scheduled, sampling)
        logits = torch.zeros(len(sampling), VOCAB)
        logits[:, 1] = 1.0
        positions = torch.full((len(sampling),), 2)
        sampled = self.sampler.sample(order, logits, positions, None)
        if sampled is None:
            return None
        self.sampler.observe(sampled.sampled_token_ids, torch.ones(len(sampling)).int())
        return sampled.sampled_token_ids.flatten().tolist()


def test_a_step_that_samples_nothing() -> None:
    assert Steps().sample("abc", "") is None


def test_adjustments_follow_their_request() -> None:
    steps = Steps()
    assert steps.sample("abc", "abc") == [1, 5, 1]
    assert steps.sample("cba", "cb") == [1, 5]
    assert steps.sample("abc", "ac") == [1, 1]
    steps.remove("b")
    assert steps.sample("ac", "ac") == [1, 1]
    steps.add("b", GREEDY)
    assert steps.sample("abc", "abc") == [1, 1, 1]


def test_metadata_is_made_once_for_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[SamplingParams]] = []

    class Counting(SamplingMetadata):
        @classmethod
        def build(
            cls, params: list[SamplingParams], vocab_size: int, device: torch.device
        ) -> SamplingMetadata:
            made.append(params)
            return SamplingMetadata.build(params, vocab_size, device)

    monkeypatch.setattr(step_sampler, "SamplingMetadata", Counting)
    steps = Steps()
    for _ in range(3):
        steps.sample("abc", "ac")
    assert made == [[GREEDY, GREEDY]]
    steps.sample("abc", "abc")
    assert len(made) == 2
    steps.sample("abc", "ac")
    assert len(made) == 3
    other = SamplingParams(temperature=0.5, seed=1)
    steps.remove("c")
    steps.add("c", other)
    steps.sample("abc", "ac")
    assert made[3:] == [[GREEDY, other]]


def test_a_request_samples_once_at_the_end_of_its_prompt_and_after_each_draft_then() -> None:
    """Among the same requests, which is another number of rows."""
    params = SamplingParams(temperature=1.0, seed=2)
    batch = InputBatch(2, (1, 3))
    sampler = StepSampler(VOCAB, CPU, Progress.create(2, 3, CPU))
    for req_id, computed in (("a", 4), ("b", 2)):
        state = batch.add(req_id, [1, 2, 3, 4], 4, params, computed)
        sampler.add(state)
    for scheduled, rows in (({"a": 3, "b": 2}, 4), ({"a": 3, "b": 3}, 6)):
        order = batch.order(scheduled, {"a", "b"})
        sampled = sampler.sample(order, torch.zeros(rows, VOCAB), torch.arange(rows), None)
        assert sampled is not None and len(sampled.sampled_token_ids) == rows
        batch.advance(order)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_gathers_is_recorded(ranks: int) -> None:
    """One of another package: its logits are whole on every rank."""
    sampler, log = Steps().sampler, DecisionLog(is_logged=False)
    with as_first_rank_of(ranks), log.current():
        sampler.share_vocabulary(nn.Identity())
    assert sampler.shard is None
    found = [d.chosen for d in log.decisions() if d.what == "logits of several ranks"]
    assert found == ["gathered whole"] * (ranks - 1)
