# SPDX-License-Identifier: Apache-2.0
"""`vllm bench acceptance` predicts what serving accepts, for every kind of head that it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from dflash_models import Block, dflash_tensors, write_dflash
from draft_models import Shape, gen
from drafter_engines import DRAFTS, Watched, nearly_a_bigram_model
from parity_checks import MakeEngine, in_this_process, prompts
from safetensors.torch import load_file, save_file
from tiny_models import hf_residual_streams

from vllm.benchmarks.acceptance import AcceptanceArgs, predict

pytestmark = [pytest.mark.parity, in_this_process]

PROMPT, OUTPUT, SAMPLES = 12, 48, 6


def drafter_of_blocks(path: Path, target: Path) -> Path:
    """Whose newest token's row predicts as a target does that knows little but that token."""
    shape = replace(Shape(), draft_vocab=Shape().vocab)
    block = Block(size=DRAFTS, from_anchor=True)
    tensors = dflash_tensors(shape, block)
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = gen(name, tensors[name].shape, 0.02)
    norm = load_file(target / "model.safetensors")["model.norm.weight"]
    tensors["norm.weight"] = 1 + norm.double()
    return write_dflash(path, target, shape, block, tensors=tensors)


def write_dataset(path: Path, target: Path, texts: list[list[int]]) -> Path:
    """The target's own texts and its streams, by transformers."""
    (path / "hidden_states").mkdir(parents=True)
    for i, ids in enumerate(texts):
        streams = torch.stack(hf_residual_streams(target, ids)[1:], dim=1)
        stored = {"hidden_states": streams.contiguous(), "token_ids": torch.tensor(ids)}
        save_file(stored, path / "hidden_states" / f"hs_{i}.safetensors")
    masks = [[0] * PROMPT + [1] * (len(ids) - PROMPT) for ids in texts]
    columns = {"input_ids": texts, "loss_mask": masks, "seq_len": [len(ids) for ids in texts]}
    datasets.Dataset.from_dict(columns).save_to_disk(path)
    (path / "extraction.json").write_text(json.dumps({"layers": [1, 2, 3, 4]}))
    return path


@pytest.mark.parametrize("method", ["mtp", "dflash"])
def test_serving_accepts_as_predicted(method: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    """Within 3 % (docs/drafters.md)."""
    target = nearly_a_bigram_model(tmp_path)
    drafter = target if method == "mtp" else drafter_of_blocks(tmp_path / "drafter", target)
    speculation = {
        "method": method,
        "model": str(drafter),
        "num_speculative_tokens": DRAFTS,
        "full_width": True,
    }
    run = Watched(
        make_engine(
            "qwen3_5", model=str(target), speculative_config=speculation, disable_log_stats=False
        )
    )
    run.generate(prompts((PROMPT,) * SAMPLES), [OUTPUT] * SAMPLES)
    served = {metric.name: metric for metric in run.llm.get_metrics()}
    rounds = served["vllm:spec_decode_num_drafts"].value
    per_position = served["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    rates = [count / rounds for count in per_position]

    dataset = write_dataset(tmp_path / "dataset", target, run.texts())
    arguments = AcceptanceArgs(
        model=str(target),
        drafter=str(drafter),
        dataset=str(dataset),
        num_speculative_tokens=DRAFTS,
    )
    predicted = predict(arguments)
    assert predicted.length == pytest.approx(1 + sum(rates), rel=0.03)
    assert predicted.rates == pytest.approx(rates, abs=0.03)
    assert rates[0] > 0.2
