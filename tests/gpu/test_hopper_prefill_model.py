# SPDX-License-Identifier: Apache-2.0
"""A model whose prompts go through the CUDA C++ attention answers as with Triton's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from vllm import LLM, SamplingParams
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.attention.hopper_prefill import takes_attention
from vllm.kernels.attention.triton import paged_attention
from vllm.kernels.cuda_library import HOPPER
from vllm.platforms import current_platform

pytestmark = pytest.mark.gpu

PROMPTS = [700, 90, 300, 33]


def model_of(head_dim: int, path: Path) -> Path:
    """A Llama with random weights, 8 query heads and 2 kv heads."""
    base = tiny_model("llama", torch.bfloat16)
    config = AutoConfig.from_pretrained(base)
    config.head_dim, config.num_attention_heads, config.num_key_value_heads = head_dim, 8, 2
    config.max_position_embeddings, config.initializer_range = 2048, 0.1
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    AutoTokenizer.from_pretrained(base).save_pretrained(path)
    return path


def answers(path: Path) -> list[dict[int, float]]:
    """The likeliest tokens after each prompt, which is cut where a step is full."""
    llm = LLM(str(path), dtype="bfloat16", max_model_len=1024, max_num_seqs=4,
              max_num_batched_tokens=512, enable_prefix_caching=False,
              kv_cache_memory_bytes=64 * 2**20)  # fmt: skip
    prompts = [{"prompt_token_ids": [(7 * i + n) % 250 for i in range(n)]} for n in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=5)
    results = [result.outputs[0].logprobs for result in llm.generate(prompts, params)]
    return [{token: entry.logprob for token, entry in top[0].items()} for top in results]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_answers_are_tritons_within_rounding(
    head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"the kernel needs compute capability {HOPPER}")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    path = model_of(head_dim, tmp_path)
    ops = vars(current_platform.kernels)
    serving, taken = ops["paged_attention"], []

    def recorded(p: AttentionProblem) -> None:
        taken.append(takes_attention(p))
        serving(p)

    monkeypatch.setitem(ops, "paged_attention", recorded)
    found = answers(path)
    assert any(taken)
    monkeypatch.setitem(ops, "paged_attention", paged_attention)
    expected = answers(path)
    for ours, triton in zip(found, expected, strict=True):
        shared = ours.keys() & triton.keys()
        assert len(shared) >= 4
        assert all(abs(ours[token] - triton[token]) < 1 / 16 for token in shared)
