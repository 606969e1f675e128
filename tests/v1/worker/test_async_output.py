# SPDX-License-Identifier: Apache-2.0
"""What a launched step hands to the host."""

from __future__ import annotations

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput, SamplerOutput
from vllm.v1.worker.async_output import StepOutput
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


def test_logprobs_as_many_as_asked_for() -> None:
    asked = {"two": 2, "none": None, "all": -1, "zero": 0}
    output = _output(asked, dict.fromkeys(asked, 1), set(asked), width=VOCAB)
    assert set(output.logprobs) == {"two", "all", "zero"}
    widths = {name: lists.token_ids.shape for name, lists in output.logprobs.items()}
    assert widths == {"two": (1, 3), "all": (1, VOCAB + 1), "zero": (1, 1)}
    assert output.logprobs["all"].token_ids[0, 0] == 200 and output.logprobs["all"].ranks == [3]
