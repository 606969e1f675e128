# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks on GPUs of their own, over NCCL: graphs, prefix caching, sleep."""

from __future__ import annotations

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


def _device(worker: Any) -> str:
    return str(torch.cuda.get_device_properties(worker.device).uuid)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "llama", "qwen3_5_moe"])
def test_ranks_on_two_gpus(
    family: str, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, the second time from the prefix cache, and once more after sleep."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    llm = LLM(
        str(tiny_model(family, torch.float32)),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=64 * 2**20,
        tensor_parallel_size=2,
        enforce_eager=enforce_eager,
        enable_sleep_mode=True,
    )
    try:
        assert len(set(llm.collective_rpc(_device))) == 2
        for again in range(3):
            for output in generate(llm, prompts((1, 17, 63, 300)), 32):
                assert_equals_reference(output, tiny_model(family), 32)
            if again == 1:
                llm.sleep(1)
                llm.wake_up()
    finally:
        llm.llm_engine.engine_core.shutdown()
