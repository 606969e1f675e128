# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages on GPUs of their own, over NCCL: graphs, prefix caching, sleep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.parity.parity_checks import assert_equals_reference, generate, prompts
from tests.tiny_models import tiny_model
from vllm import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engines: list[LLM] = []

    def make_engine(family: str, **settings: Any) -> LLM:
        engines.append(
            LLM(
                str(tiny_model(family, torch.float32)),
                dtype="float32",
                max_model_len=512,
                max_num_seqs=16,
                max_num_batched_tokens=64,
                kv_cache_memory_bytes=64 * 2**20,
                pipeline_parallel_size=2,
                **settings,
            )
        )
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_stages_on_two_gpus(family: str, enforce_eager: bool, make: Any) -> None:
    """Twice, the second time from the prefix cache, and once more after sleep."""
    llm = make(family, enforce_eager=enforce_eager, enable_sleep_mode=True)
    for again in range(3):
        for output in generate(llm, prompts((1, 17, 63, 300)), 32):
            assert_equals_reference(output, tiny_model(family), 32)
        if again == 1:
            llm.sleep(1)
            llm.wake_up()
