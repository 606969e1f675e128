# SPDX-License-Identifier: Apache-2.0
"""Replicas on GPUs of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_models import tiny_model
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu


def _device(worker: Any) -> str:
    return str(torch.cuda.get_device_properties(worker.device).uuid)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_each_replica_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    options: dict[str, Any] = {"max_model_len": 256, "seed": 0, "gpu_memory_utilization": 0.2}
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    prompts = [[i + 1, i + 2, i + 3] * 8 for i in range(8)]
    tokens = []
    for size in (1, 2):
        llm = LLM(str(tiny_model("qwen3_5")), data_parallel_size=size, **options)
        try:
            assert len(set(llm.collective_rpc(_device))) == size
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([list(output.outputs[0].token_ids) for output in outputs])
        finally:
            llm.shutdown()
    assert tokens[0] == tokens[1]
