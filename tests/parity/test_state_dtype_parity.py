# SPDX-License-Identifier: Apache-2.0
"""Recurrent state in bf16, from the flag to the text; its cost in accuracy is stated and small."""

from __future__ import annotations

from math import prod

import pytest
import torch
from parity_checks import MakeEngine, core_in_this_process, prompts
from tiny_models import hf_reference_logits, tiny_model

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.kv_cache_interface import MambaSpec

pytestmark = pytest.mark.parity

LENGTHS = (20, 80, 200)
CHUNK = 17


def scored(llm: LLM) -> list[torch.Tensor]:
    """Log-probability of every prompt token but the first; short chunks store states often."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    batch = prompts(LENGTHS)
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=p) for p in batch], params, use_tqdm=False
    )
    return [
        torch.tensor([row[t].logprob for row, t in zip(o.prompt_logprobs[1:], p[1:], strict=True)])  # type: ignore[index,union-attr]
        for o, p in zip(outputs, batch, strict=True)
    ]


def recurrent_group(llm: LLM) -> tuple[MambaSpec, int]:
    """Spec and bytes per block of the group in the running engine's plan."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config  # type: ignore[attr-defined]
    for group_id, group in enumerate(config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, MambaSpec):
            size = len(group.layer_names) * group.kv_cache_spec.page_size_bytes
            assert config.plan.block_stride(group_id) >= size
            return group.kv_cache_spec, size
    raise AssertionError("no recurrent group")


def expected() -> list[torch.Tensor]:
    """The same by transformers."""
    path = tiny_model("qwen3_5")
    rows = [hf_reference_logits(path, ids).log_softmax(-1)[:-1] for ids in prompts(LENGTHS)]
    return [
        row.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        for row, ids in zip(rows, prompts(LENGTHS), strict=True)
    ]


@core_in_this_process
def test_bf16_state_is_smaller_and_close(make_engine: MakeEngine) -> None:
    """A prompt's state is rounded at the end of each chunk: n times, which leaves it right up to
    sqrt(n) 2^-9 (see tests/kernels/test_state_dtype.py). Log-probabilities of this checkpoint
    follow its state at a scale of one."""
    reference, errors, num_bytes = expected(), {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        llm = make_engine("qwen3_5", mamba_ssm_cache_dtype=name, max_num_batched_tokens=CHUNK)
        spec, num_bytes[dtype] = recurrent_group(llm)
        assert spec.dtypes == (torch.float32, dtype)
        differences = [(a - b).abs() for a, b in zip(scored(llm), reference, strict=True)]
        errors[dtype] = [float(d.mean()) for d in differences]
    assert max(errors[torch.float32]) < 1e-5
    for length, error in zip(LENGTHS, errors[torch.bfloat16], strict=True):
        assert 1e-5 < error < (length / CHUNK) ** 0.5 * 2**-9
    per_layer = prod(spec.shapes[1]) * 2
    assert num_bytes[torch.float32] - num_bytes[torch.bfloat16] == 3 * per_layer
