# SPDX-License-Identifier: Apache-2.0
"""After start-up a step waits for nothing, allocates nothing lasting and compiles nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from step_driver import Driver, engine, on_worker

from vllm import LLM, SamplingParams
from vllm.kernels.triton import compile_log
from vllm.v1.worker.model_runner import ModelRunner

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_syncs() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_syncs")
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_decodes_neither_wait_nor_allocate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch, family) as llm:
        on_worker(llm, _steady_decodes)


def _steady_decodes(runner: ModelRunner) -> None:
    driver = Driver(runner)
    names = [f"r{i}" for i in range(16)]
    driver.step(dict.fromkeys(names, 20), [])
    for _ in range(20):
        driver.step({}, names)
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(200):
        driver.step({}, names)
    torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for counter in ("segment.all.allocated", "num_alloc_retries", "allocated_bytes.all.current"):
        assert after[counter] == before[counter], counter
    # Sampling runs outside the graph: its few tensors come from the allocator's cache.
    made = after["allocation.all.allocated"] - before["allocation.all.allocated"]
    assert made <= 8 * 200
    driver.close()


@pytest.mark.usefixtures("no_syncs")
def test_mixed_steps_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch, "qwen3_5") as llm:
        on_worker(llm, _steady_mixed_steps)


def _steady_mixed_steps(runner: ModelRunner) -> None:
    driver = Driver(runner)
    names = [f"r{i}" for i in range(8)]
    driver.step(dict.fromkeys(names, 20), [])
    for i in range(40):
        if i == 20:
            torch.cuda.set_sync_debug_mode("error")
        driver.step({f"p{i}": 30 + i}, names)
        driver.end([f"p{i}"])
    driver.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "qwen3_5"])
def test_no_length_compiles_a_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch, family) as llm:
        known = compile_log.compiled()
        assert known
        _sweep(llm)
        assert compile_log.compiled()[len(known) :] == []


def _sweep(llm: LLM) -> None:
    """Prompts and outputs of many lengths, in batches of many sizes, greedy and not."""
    source = random.Random(0)
    for count in (1, 2, 3, 5, 8, 13, 24, 40):
        prompts = [
            {"prompt_token_ids": [source.randrange(256) for _ in range(source.randint(1, 450))]}
            for _ in range(count)
        ]
        params = [
            SamplingParams(
                temperature=source.choice((0.0, 0.8)),
                top_p=source.choice((1.0, 0.9)),
                top_k=source.choice((0, 20)),
                seed=i,
                max_tokens=source.randint(1, 50),
                ignore_eos=True,
            )
            for i in range(count)
        ]
        llm.generate(prompts, params, use_tqdm=False)
