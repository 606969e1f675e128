# SPDX-License-Identifier: Apache-2.0
"""Sleeping frees the GPU, and what wakes up computes the same bits, through graphs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from vllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu

ARENA_BYTES = 1 << 30


def _outputs(llm: LLM) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": list(range(5 + i, 60 + 2 * i))} for i in range(3)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def _used(worker: Any) -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _allocated(worker: Any) -> int:
    """Bytes of live tensors: what this process holds beside the driver's own memory."""
    return torch.cuda.memory_allocated()


def _graph_sizes(worker: Any) -> list[int]:
    sizes: list[int] = worker.model_runner.graphs.sizes
    return sizes


def _weight_bytes(worker: Any) -> int:
    return sum(p.untyped_storage().nbytes() for p in worker.get_model().parameters())


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_tied"])
def test_gpu_memory(monkeypatch: pytest.MonkeyPatch, family: str, eager: bool) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(
        str(tiny_model(family, torch.bfloat16)),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=ARENA_BYTES,
        enforce_eager=eager,
        enable_sleep_mode=True,
    )
    expected = _outputs(llm)
    (sizes,), (weights,) = llm.collective_rpc(_graph_sizes), llm.collective_rpc(_weight_bytes)
    assert bool(sizes) != eager
    awake_used, awake_allocated = llm.collective_rpc(_used)[0], llm.collective_rpc(_allocated)[0]
    for level in (1, 2, 1):
        llm.sleep(level)
        assert llm.collective_rpc(_weight_bytes) == [0]
        assert awake_allocated - llm.collective_rpc(_allocated)[0] > 0.99 * ARENA_BYTES + weights
        assert awake_used - llm.collective_rpc(_used)[0] > 0.95 * ARENA_BYTES
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        llm.wake_up(["kv_cache"])
        assert llm.collective_rpc(_graph_sizes) == [sizes]
        assert llm.collective_rpc(_weight_bytes) == [weights]
        assert _outputs(llm) == expected
    llm.shutdown()
