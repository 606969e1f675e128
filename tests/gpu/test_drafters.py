# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers of their own replay graphs: texts and proposals are those of eager steps,
also where some steps draft nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_models import Block, write_dflash
from draft_models import TINY, mtp_tensors, with_mtp, write_eagle3
from tiny_models import tiny_model

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.draft_policy import DraftPolicy

pytestmark = pytest.mark.gpu

DRAFTS = 3
#: captured sizes: both sides then run the very same kernels
COUNTS = (1, 8, 16, 24)


def _settings(name: str, path: Path) -> tuple[Path, dict[str, Any]]:
    """Target and `speculative_config`."""
    target = tiny_model("qwen3_5")
    if name == "mtp":
        target = with_mtp(target, path / "target", mtp_tensors(TINY))
        return target, {"method": "mtp"}
    if name == "eagle3":
        draft = write_eagle3(path / "draft", target, TINY, {"norm_before_residual": True})
        return target, {"method": "eagle3", "model": str(draft)}
    if name == "dflash":
        draft = write_dflash(path / "draft", target, TINY, Block(size=1 + DRAFTS))
        return target, {"method": "dflash", "model": str(draft)}
    return target, {"method": "draft_model", "model": str(tiny_model("llama"))}


def _run(
    target: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, eager: bool
) -> tuple[list[Any], list[Any], int]:
    """Texts, proposals in order, and replays of the drafter's graphs."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(
        str(target),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=24,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 * 2**20,
        async_scheduling=False,
        enforce_eager=eager,
        compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"},
        speculative_config=config | {"num_speculative_tokens": DRAFTS},
    )
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    drafter, proposed, replayed = runner.drafter, [], 0
    propose = drafter.propose

    def watched(step: Any) -> None:
        propose(step)
        made = slice(1, 1 + step.num_drafts)
        proposed.append(runner.inputs.progress.tokens[step.order.rows, made].tolist())

    def counting(graphs: Any) -> Any:
        replay = graphs.replay

        def run(size: int) -> torch.Tensor:
            nonlocal replayed
            replayed += 1
            result: torch.Tensor = replay(size)
            return result

        return run

    drafter.propose = watched
    for graphs in drafter._graphs.values():
        graphs.replay = counting(graphs)
    counts = itertools.cycle([DRAFTS] * 5 + [0] * 3 + [1] * 4)
    monkeypatch.setattr(DraftPolicy, "choose", lambda policy, count: next(counts))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts = []
    for count in COUNTS:
        prompts = [{"prompt_token_ids": list(range(5 + i, 60 + i))} for i in range(count)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts += [tuple(output.outputs[0].token_ids) for output in outputs]
    llm.llm_engine.engine_core.shutdown()
    return texts, proposed, replayed


@pytest.mark.parametrize("name", ["mtp", "eagle3", "dflash", "draft_model"])
def test_replayed_drafts_are_the_eager_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, config = _settings(name, tmp_path)
    texts, proposed, replayed = _run(target, config, monkeypatch, eager=False)
    eager_texts, eager_proposed, none = _run(target, config, monkeypatch, eager=True)
    assert (replayed > 20, none) == (True, 0)
    assert texts == eager_texts
    assert proposed == eager_proposed
