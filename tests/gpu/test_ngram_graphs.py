# SPDX-License-Identifier: Apache-2.0
"""With prompt lookup steps of all widths replay graphs, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from vllm import LLM, SamplingParams, TokensPrompt

pytestmark = pytest.mark.gpu

FEW = [40, 41, 42]
PROMPTS = [[(7 * i + j) % 5 + 40 for j in range(20 + i)] for i in range(6)]


def make_llm(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return LLM(
        str(tiny_model("qwen3_5", torch.float32)),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 * 2**20,
        **settings,
    )


def outputs(llm: LLM) -> list[tuple[int, ...]]:
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=FEW),
        SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, bad_words=["()"]),
    ]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS]
    chosen = [params[i % 2] for i in range(len(prompts))]
    found = llm.generate(prompts, chosen, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in found]


def alternate(llm: LLM) -> None:
    """Steps of width 4, 4, 1, 4, 2, 2, 1, 2, ... in turn."""
    choices = cycle([3, 3, 0, 3, 1, 1, 0, 1])
    policy = llm.llm_engine.engine_core.engine_core.scheduler.draft_policy
    policy.choose = lambda _: next(choices)


def test_all_widths_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    expected = outputs(make_llm(monkeypatch))
    llm = make_llm(monkeypatch, speculative_config=config)
    alternate(llm)
    runner = llm.llm_engine.engine_core.engine_core.executor.worker.model_runner
    replayed: list[tuple[int, bool]] = []
    replay_for: Callable[[Any], Any] = runner.graphs.replay_for

    def watched(order: Any) -> Any:
        chosen = replay_for(order)
        if order.decode_only:
            replayed.append((order.width, chosen is not None and chosen.whole))
        return chosen

    runner.graphs.replay_for = watched
    assert outputs(llm) == expected
    assert {(1, True), (2, True), (4, True)} == set(replayed)


def test_drafting_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = make_llm(monkeypatch, speculative_config=config)
    outputs(llm)
    runner = llm.llm_engine.engine_core.engine_core.executor.worker.model_runner
    accept, calls = runner._accept, []

    def strict(*args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            accept(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        calls.append(args)

    runner._accept = strict
    outputs(llm)
    assert calls
