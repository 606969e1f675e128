# SPDX-License-Identifier: Apache-2.0
"""FlashInfer as the attention backend gives what our own kernels give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import hf_reference_logits, tiny_model

from vllm import LLM, SamplingParams
from vllm.decisions import Decision

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FAMILY = "qwen3_5_wide"  # heads of 256, which FlashInfer has kernels for


def _run(backend: str) -> tuple[list[Any], list[Decision]]:
    """Outputs, and what was decided of graphs."""
    llm = LLM(
        str(tiny_model(FAMILY, torch.bfloat16)),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=256 * 2**20,
        attention_backend=backend,
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 250 for j in range(n)]} for i, n in
               enumerate((1, 16, 17, 100, 300))]  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    modes = [d for d in llm.explain().decisions if d.what == "cudagraph_mode"]
    llm.llm_engine.engine_core.shutdown()
    return outputs, modes


def _error(outputs: list[Any]) -> float:
    """Mean absolute difference of the chosen tokens' logprobs from fp32 transformers."""
    model, differences = tiny_model(FAMILY, torch.bfloat16), []
    for output in outputs:
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        logits = hf_reference_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        entries = zip(output.outputs[0].logprobs, tokens, strict=True)
        got = torch.tensor([entry[token].logprob for entry, token in entries])
        differences.append((got - expected).abs())
    return float(torch.cat(differences).mean())


def test_flashinfer_is_as_exact_as_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    outputs, modes = _run("FLASHINFER")
    ours, theirs = _error(_run("PAGED")[0]), _error(outputs)
    assert theirs < 1.5 * ours + 1e-3, (ours, theirs)
    assert modes[-1].chosen == "PIECEWISE" and "FLASHINFER" in modes[-1].why
