# SPDX-License-Identifier: Apache-2.0
"""The greedy tests can fail: an engine that loses its recurrent state does not pass them."""

from __future__ import annotations

import pytest
import torch
from parity_checks import MakeEngine, assert_equals_reference, generate, prompts
from tiny_models import tiny_model

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.model_runner import ModelRunner

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("part", [0, 1], ids=["convolution", "recurrent"])
def test_zeroed_state_is_noticed(
    part: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ModelRunner.execute_model

    def forgetful(runner: ModelRunner, output: SchedulerOutput) -> object:
        for cache in runner.arena.layers.values():
            if isinstance(cache, tuple):
                cache[part].zero_()
        return original(runner, output)

    monkeypatch.setattr(ModelRunner, "execute_model", forgetful)
    llm = make_engine("qwen3_5", max_num_batched_tokens=64)
    output = generate(llm, prompts((65,)))[0]
    with pytest.raises(AssertionError):
        assert_equals_reference(output, tiny_model("qwen3_5"))


def test_stale_blocks_do_not_matter(make_engine: MakeEngine) -> None:
    """Whatever a block held before, a new request never sees it."""
    llm = make_engine("qwen3_5", max_num_batched_tokens=64)

    def poison(worker: object) -> None:
        runner = worker.model_runner  # type: ignore[attr-defined]
        runner.arena.buffer.fill_(0xFF)
        for cache in runner.arena.layers.values():
            for tensor in cache if isinstance(cache, tuple) else (cache,):
                assert torch.isnan(tensor).all()

    llm.collective_rpc(poison)
    for output in generate(llm, prompts((1, 17, 65))):
        assert_equals_reference(output, tiny_model("qwen3_5"))
