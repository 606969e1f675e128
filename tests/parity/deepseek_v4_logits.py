# SPDX-License-Identifier: Apache-2.0
"""What an engine gives for every position of one long prompt, over the whole vocabulary."""

from __future__ import annotations

import torch
from parity_checks import prompts
from torch import Tensor

from vllm import LLM, SamplingParams, TokensPrompt

FAMILY = "deepseek_v4"
(IDS,) = prompts((301,), seed=5)


def prompt_logits(llm: LLM) -> Tensor:
    """Logprobs `[len(IDS) - 1, vocab]` of what follows each token but the last; the engine's
    `max_logprobs` must be -1."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    batch = [TokensPrompt(prompt_token_ids=IDS)]
    (output,) = llm.generate(batch, params, use_tqdm=False)
    rows = [row for row in output.prompt_logprobs or [] if row is not None]
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])
