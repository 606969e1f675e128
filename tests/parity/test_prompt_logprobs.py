# SPDX-License-Identifier: Apache-2.0
"""Every prompt position is scored once and right, however the prompt is cut."""

from __future__ import annotations

import pytest
from parity_checks import MakeEngine, prompts
from tiny_models import hf_reference_logits, tiny_model

from vllm import SamplingParams, TokensPrompt

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("preempt", [False, True], ids=["plain", "preempted"])
@pytest.mark.parametrize("max_num_batched_tokens", [2, 17, 64])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_prompt_logprobs(
    family: str, max_num_batched_tokens: int, preempt: bool, make_engine: MakeEngine
) -> None:
    """Small budgets cut prompts into single tokens beside running decodes."""
    llm = make_engine(
        family,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=2 if max_num_batched_tokens == 2 else 16,
        num_gpu_blocks_override=26 if preempt else None,
        max_model_len=384,
    )
    batch = prompts((1, 2, 15, 33, 80))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=2)
    inputs = [TokensPrompt(prompt_token_ids=ids) for ids in batch]
    for ids, output in zip(batch, llm.generate(inputs, params, use_tqdm=False), strict=True):
        got = output.prompt_logprobs
        assert got is not None and got[0] is None and len(got) == len(ids)
        expected = hf_reference_logits(tiny_model(family), ids).log_softmax(-1)
        for position in range(1, len(ids)):
            entries, row = got[position], expected[position - 1]
            assert entries is not None and {ids[position], int(row.argmax())} <= set(entries)
            for token, entry in entries.items():
                assert abs(entry.logprob - float(row[token])) < 1e-4
                assert entry.rank == int((row > row[token]).sum()) + 1
