# SPDX-License-Identifier: Apache-2.0
"""Steps padded as piecewise graphs need it compute what steps without padding do.

The pieces' place is taken by a plain run of the model over the padded rows, so this needs no GPU:
what it shows is that padding never reaches a cache or a real row, which the sanitizer also checks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_checks import (
    MakeEngine,
    assert_equals_reference,
    generate,
    in_this_process,
    prompts,
)
from tiny_models import tiny_model
from torch import Tensor

from tests.extraction_options import extraction
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.v1.core.sched.step_shape import StepShape
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.step_graphs import Replay, StepGraphs
from vllm.v1.worker.step_inputs import StepInputBuilder, StepInputs

pytestmark = pytest.mark.parity


class PaddedSteps(StepGraphs):
    """Pads every step to a multiple of `unit` tokens; a "replay" runs the model."""

    def __init__(self, runner: ModelRunner, unit: int) -> None:
        super().__init__()
        self._runner = runner
        self._unit = unit
        self.padding: list[int] = []

    def replay_for(self, shape: StepShape) -> Replay | None:
        tokens = shape.num_tokens
        size = min(-(-tokens // self._unit) * self._unit, self._runner.max_tokens)
        self.padding.append(size - tokens)
        return Replay(size, whole=False)

    def replay(self, chosen: Replay) -> Tensor:
        inputs = _last_inputs[id(self._runner.inputs)]
        assert len(inputs.input_ids) == len(inputs.positions) == chosen.size
        return self._runner._forward(inputs)


_last_inputs: dict[int, StepInputs] = {}


@pytest.fixture
def remembered_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    build = StepInputBuilder.build

    def remember(self: StepInputBuilder, *args: Any, **kwargs: Any) -> StepInputs:
        inputs = _last_inputs[id(self)] = build(self, *args, **kwargs)
        return inputs

    monkeypatch.setattr(StepInputBuilder, "build", remember)


def pad(llm: LLM, unit: int = 13) -> PaddedSteps:
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    runner.graphs = PaddedSteps(runner, unit)
    return runner.graphs


@in_this_process
@pytest.mark.usefixtures("remembered_inputs")
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "qwen3_5"])
def test_tokens_equal_the_reference(family: str, make_engine: MakeEngine) -> None:
    llm = make_engine(family, max_num_batched_tokens=64, sanitize=True, enable_prefix_caching=True)
    steps = pad(llm)
    for output in generate(llm, prompts()):
        assert_equals_reference(output, tiny_model(family))
    assert len(set(steps.padding)) > 5, "the steps were hardly ever padded"


@in_this_process
@pytest.mark.usefixtures("remembered_inputs")
def test_captured_rows_are_those_of_real_tokens(make_engine: MakeEngine, tmp_path: Path) -> None:
    files = []
    for padded in (False, True):
        llm = make_engine(
            "qwen3_5",
            max_num_batched_tokens=64,
            sanitize=True,
            **extraction(str(tmp_path / str(padded)), [0, 4]),
        )
        if padded:
            pad(llm)
        extra = {"kv_transfer_params": {"include_output_tokens": True}}
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, extra_args=extra)
        batch = [{"prompt_token_ids": ids} for ids in prompts((5, 70, 31))]
        outputs = llm.generate(batch, params, use_tqdm=False)
        paths = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
        files.append([load_hidden_states(path) for path in paths])
    for plain, padded_file in zip(*files, strict=True):
        assert torch.equal(plain["token_ids"], padded_file["token_ids"])
        torch.testing.assert_close(plain["hidden_states"], padded_file["hidden_states"])
