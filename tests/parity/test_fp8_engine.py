# SPDX-License-Identifier: Apache-2.0
"""Engines with float8 weights: neither the batch nor sleep changes their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_checks import LAYOUT, MakeEngine
from quantized_models import FORMATS, Format, quantise_checkpoint
from tiny_models import tiny_model

from vllm import LLM, SamplingParams
from vllm.entrypoints.llm import RequestOutput

pytestmark = pytest.mark.parity
GATES = ("in_proj_a", "in_proj_b")
PROMPTS = [list(range(5, 60)), list(range(9, 30)), [7]]


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs: list[RequestOutput] = llm.generate(inputs, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("form", FORMATS)
def test_checkpoints(make_engine: MakeEngine, form: Format, tmp_path: Path) -> None:
    checkpoint = quantise_checkpoint(tiny_model("qwen3_5"), tmp_path, form, GATES)
    if form == "block" and LAYOUT.tp > 1:
        with pytest.raises(ValueError, match="cuts the 128-wide scale blocks"):
            make_engine("qwen3_5", model=str(checkpoint.path))
        return
    llm = make_engine("qwen3_5", model=str(checkpoint.path), enable_sleep_mode=True)
    assert llm.llm_engine.vllm_config.model_config.quantization is not None
    together = tokens(llm)
    if not torch.cuda.is_available():  # there the order of sums depends on the batch
        assert [tokens(llm, [prompt])[0] for prompt in PROMPTS] == together
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm) == together
    assert len({token for row in together for token in row}) > 8


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_quantising_at_load(make_engine: MakeEngine, load_format: str) -> None:
    plain = make_engine("qwen3_5", max_logprobs=-1)
    llm = make_engine(
        "qwen3_5",
        quantization="fp8",
        load_format=load_format,
        enable_sleep_mode=True,
        max_logprobs=-1,
    )
    weights = [engine.collective_rpc(_weight_bytes)[0] for engine in (llm, plain)]
    assert weights[0] < 0.5 * weights[1]
    together = tokens(llm)
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm) == together
    assert _agreement(llm, plain) > 0.9 if load_format == "auto" else _agreement(llm, plain) < 0.5


def _agreement(llm: LLM, other: LLM) -> float:
    """Correlation of the logprobs that two engines give the words after the first prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    rows = []
    for engine in (llm, other):
        inputs: Any = [{"prompt_token_ids": PROMPTS[0]}]
        (output,) = engine.generate(inputs, params, use_tqdm=False)
        assert output.outputs[0].logprobs is not None
        (row,) = output.outputs[0].logprobs
        rows.append(torch.tensor([row[i].logprob for i in sorted(row)]))
    return float(torch.corrcoef(torch.stack(rows))[0, 1])


def _weight_bytes(worker: Any) -> int:
    """Of the layers: the embedding and the head stay as they are."""
    layers = worker.get_model().model.layers
    return sum(p.numel() * p.element_size() for p in layers.parameters())
