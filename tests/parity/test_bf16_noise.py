# SPDX-License-Identifier: Apache-2.0
"""In bf16 an engine is as far from fp32 as transformers is: nothing is rounded once more."""

from __future__ import annotations

import pytest
import torch
from parity_checks import MakeEngine, generate, prompts
from tiny_models import hf_reference_logits, tiny_model
from torch import Tensor

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "kimi_linear", "gpt_oss"),
        *("nemotron_h", "nemotron_h_moe", "granite_h", "falcon_h1", "olmo_hybrid", "gemma3"),
    ],
)
def test_bf16_is_as_exact_as_transformers(family: str, make_engine: MakeEngine) -> None:
    """Both against fp32 on the same weights, by their median errors: a token near the border
    between two experts is routed to either, which is rare and changes a lot. Of the two, neither
    is the better one in all families; they differ by up to a third."""
    llm = make_engine(family, torch.bfloat16, max_num_batched_tokens=64)
    model = tiny_model(family, torch.bfloat16)
    errors: list[Tensor] = []
    for output in generate(llm, prompts((17, 64, 100), seed=3), 48):
        tokens, prompt = list(output.outputs[0].token_ids), list(output.prompt_token_ids or [])
        ids = prompt + tokens[:-1]
        exact, rounded = (
            hf_reference_logits(model, ids, dtype)[len(prompt) - 1 :]
            .float()
            .log_softmax(-1)
            .gather(1, torch.tensor(tokens)[:, None])[:, 0]
            for dtype in (torch.float32, torch.bfloat16)
        )
        entries = zip(output.outputs[0].logprobs or [], tokens, strict=True)
        got = torch.tensor([entry[token].logprob for entry, token in entries])
        errors.append(torch.stack([got - exact, rounded - exact]).abs())
    ours, theirs = torch.cat(errors, 1).median(1).values.tolist()
    assert ours < 2 * theirs
