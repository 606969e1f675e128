# SPDX-License-Identifier: Apache-2.0
"""What a launched step hands to the host."""

from __future__ import annotations

import torch

from vllm.kernels.step import Progress
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput, SamplerOutput
from vllm.v1.worker.async_output import ProposedDrafts, StepOutput
from vllm.v1.worker.input_batch import InputBatch

CPU = torch.device("cpu")
VOCAB = 6


def _output(
    logprobs: dict[str, int | None], counts: dict[str, int], sampling: set[str], width: int = 0
) -> ModelRunnerOutput:
    """A step of these requests; row r samples token 10 + r, its logprob in column c is r + c/10."""
    batch = InputBatch(8)
    for name, asked in logprobs.items():
        batch.add(name, [1, 2, 3], 3, SamplingParams(logprobs=asked), 2)
    order = batch.order(counts, sampling)
    n = len(order.sampling)
    rows = torch.arange(n).unsqueeze(1)
    columns = torch.arange(width + 1).unsqueeze(0)
    tensors = LogprobsTensors(rows * 100 + columns, rows + columns / 10, rows[:, 0] + 1)
    sampled = SamplerOutput(torch.arange(10, 10 + n), tensors if width else None)
    return StepOutput(order, VOCAB, sampled if n else None, [], None, {}, CPU).get_output()


def test_one_list_per_request() -> None:
    none = {"a": None, "b": None, "c": None}
    decodes = _output(none, {"a": 1, "b": 1, "c": 1}, {"a", "b", "c"})
    assert decodes.req_ids == ["a", "b", "c"] and decodes.sampled_token_ids == [[10], [11], [12]]
    mixed = _output(none, {"a": 2, "b": 1, "c": 1}, {"a", "c"})
    assert mixed.req_ids == ["b", "c", "a"] and mixed.sampled_token_ids == [[], [10], [11]]
    nothing = _output(none, {"a": 2, "b": 2}, set())
    assert nothing.sampled_token_ids == [[], []] and nothing.logprobs == {}


def test_drafts_of_the_requests_that_follow_a_grammar() -> None:
    """As they are when the step is launched, also of one that was not in it."""
    batch, progress = InputBatch(8), Progress.create(8, 4, CPU)
    assert ProposedDrafts.of_constrained(batch, progress) is None
    for name, regex in (("free", None), ("a", "a"), ("gone", "b"), ("b", "c")):
        constraint = None if regex is None else StructuredOutputsParams(regex=regex)
        params = SamplingParams(structured_outputs=constraint)
        batch.add(name, [1, 2, 3], 3, params, 3)
    batch.remove("gone")
    progress.tokens.copy_(torch.arange(32).view(8, 4))
    progress.num_drafts.copy_(torch.tensor([3, 2, 3, 0, 1, 1, 1, 1]))
    order = batch.order({"free": 1, "a": 1}, {"free", "a"})
    proposed = ProposedDrafts.of_constrained(batch, progress)
    output = StepOutput(order, VOCAB, None, [], None, {}, CPU, proposed)
    batch.remove("a")
    progress.tokens.zero_()
    progress.num_drafts.zero_()
    assert output.get_output().draft_token_ids == {"a": [5, 6], "b": []}
    assert StepOutput(order, VOCAB, None, [], None, {}, CPU).get_output().draft_token_ids == {}


def test_logprobs_as_many_as_asked_for() -> None:
    asked = {"two": 2, "none": None, "all": -1, "zero": 0}
    output = _output(asked, dict.fromkeys(asked, 1), set(asked), width=VOCAB)
    assert set(output.logprobs) == {"two", "all", "zero"}
    widths = {name: lists.token_ids.shape for name, lists in output.logprobs.items()}
    assert widths == {"two": (1, 3), "all": (1, VOCAB + 1), "zero": (1, 1)}
    assert output.logprobs["all"].token_ids[0, 0] == 200 and output.logprobs["all"].ranks == [3]
