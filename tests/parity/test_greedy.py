# SPDX-License-Identifier: Apache-2.0
"""fp32 greedy output equals transformers' token for token, however the work is cut."""

from __future__ import annotations

import pytest
import torch
from parity_checks import (
    LAYOUT,
    MakeEngine,
    assert_equals_reference,
    generate,
    one_replica,
    prompts,
)
from tiny_models import hf_reference_logits, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.parity]

FAMILIES = ("llama", "qwen3", "qwen3_5", "qwen3_5_wrapper")


def test_engines_have_the_workers_of_the_layout(make_engine: MakeEngine) -> None:
    """Those of VLLM_TEST_LAYOUT, unless a test says how many there are."""
    llm = make_engine("llama")
    sizes = llm.llm_engine.vllm_config.parallel_config
    assert (sizes.tensor_parallel_size, sizes.pipeline_parallel_size) == (LAYOUT.tp, LAYOUT.pp)
    assert llm.collective_rpc(lambda worker: worker.rank) == LAYOUT.dp * [
        *range(LAYOUT.tp * LAYOUT.pp)
    ]
    one = make_engine("llama", tensor_parallel_size=1)
    assert one.collective_rpc(lambda worker: worker.rank) == [0]


@pytest.mark.parametrize("max_num_batched_tokens", [17, 64, 8192])
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_together(
    family: str, max_num_batched_tokens: int, make_engine: MakeEngine
) -> None:
    llm = make_engine(family, max_num_batched_tokens=max_num_batched_tokens)
    for output in generate(llm, prompts()):
        assert_equals_reference(output, tiny_model(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_alone(family: str, make_engine: MakeEngine) -> None:
    llm = make_engine(family, max_num_batched_tokens=64)
    for prompt in prompts():
        assert_equals_reference(generate(llm, [prompt])[0], tiny_model(family))


@one_replica
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_preempted(family: str, async_scheduling: bool, make_engine: MakeEngine) -> None:
    llm = make_engine(
        family,
        max_num_batched_tokens=64,
        async_scheduling=async_scheduling,
        num_gpu_blocks_override=26,
        disable_log_stats=False,
        max_model_len=384,
    )
    for output in generate(llm, prompts()):
        assert_equals_reference(output, tiny_model(family))
    preemptions = {m.name: m for m in llm.get_metrics()}["vllm:num_preemptions"]
    assert preemptions.value > 0, "the arena was large enough; the test shows nothing"


@one_replica
@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_cached(family: str, make_engine: MakeEngine) -> None:
    llm = make_engine(family, max_num_batched_tokens=64, enable_prefix_caching=True)
    shared = prompts((100,))[0]
    batch = [shared + tail for tail in prompts((1, 7, 40), seed=1)]
    for _ in range(2):
        outputs = generate(llm, batch)
        for output in outputs:
            assert_equals_reference(output, tiny_model(family))
    hits = [output.num_cached_tokens for output in outputs]
    if family in ("llama", "qwen3"):
        # Everything but the last partial block was computed in the first round.
        assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in batch]
    else:
        assert hits == [len(prompt) - 1 for prompt in batch]


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logprobs(family: str, make_engine: MakeEngine) -> None:
    """Mean absolute difference of logprobs over the engine's own tokens."""
    llm = make_engine(family, torch.bfloat16, max_num_batched_tokens=64)
    model = tiny_model(family, torch.bfloat16)
    differences = []
    for output in generate(llm, prompts((17, 64, 100))):
        tokens, prompt = list(output.outputs[0].token_ids), list(output.prompt_token_ids)
        logits = hf_reference_logits(model, prompt + tokens[:-1], torch.bfloat16).float()
        expected = logits[len(prompt) - 1 :].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        entries = zip(output.outputs[0].logprobs, tokens, strict=True)
        got = torch.tensor([entry[token].logprob for entry, token in entries])
        differences.append((got - expected).abs())
    assert torch.cat(differences).mean().item() <= 0.02
