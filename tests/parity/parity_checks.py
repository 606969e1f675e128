# SPDX-License-Identifier: Apache-2.0
"""Comparing an engine's output with transformers, by teacher forcing.

If every generated token is the argmax of the reference's logits given the tokens before it, the
output equals the reference's own greedy output, token for token: by induction over positions.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import hf_reference_logits, hf_residual_streams, tiny_model
from transformers import PreTrainedModel

from tests.extraction_options import extraction
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.v1.core.layout_cost import Layout

MakeEngine = Callable[..., LLM]

#: `VLLM_TEST_LAYOUT=tp2pp2 pytest tests/parity` runs every engine like that whose test does not say
#: itself how many devices it has
LAYOUT = Layout.parse(os.environ.get("VLLM_TEST_LAYOUT", "tp1"))
assert not LAYOUT.ep, "VLLM_TEST_LAYOUT: few of these models have experts; see test_shared_experts"
#: the arguments of an engine for it
LAYOUT_SETTINGS = {name: size for name, size in LAYOUT.flags.items() if size is not False}
LAYOUT_FLAGS = ["-tp", str(LAYOUT.tp), "-pp", str(LAYOUT.pp), "-dp", str(LAYOUT.dp)]
#: value of VLLM_ENABLE_V1_MULTIPROCESSING: several replicas are processes
MULTIPROCESSING = "1" if LAYOUT.dp > 1 else "0"
#: families -> ranks that can share them at most: groups of DeepSeek-V4's output and OLMo-hybrid's
#: key/value heads under a norm are not copied
MOST_RANKS = {"deepseek_v4": 2, "olmo_hybrid": 2}
in_this_process = pytest.mark.skipif(
    LAYOUT.devices > 1, reason="looks into the worker, which VLLM_TEST_LAYOUT puts elsewhere"
)
core_in_this_process = pytest.mark.skipif(
    LAYOUT.dp > 1, reason="looks into the engine core, of which VLLM_TEST_LAYOUT has several"
)
one_replica = pytest.mark.skipif(
    LAYOUT.dp > 1, reason="counts on one memory and one cache; replicas have one each"
)
one_stage = pytest.mark.skipif(
    LAYOUT.pp > 1, reason="stages refuse it: tests/parity/test_staged_engines.py"
)

on_cpus = pytest.mark.skipif(
    torch.cuda.is_available(), reason="workers on CPUs; those of GPUs are in tests/gpu"
)

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 300)
NUM_TOKENS = 48


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random byte tokens, one prompt per length."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def of_workers(answer: Any) -> list[Any]:
    """What `collective_rpc` gives where all workers answer the same."""
    return [answer] * LAYOUT.devices


def journal_bytes(llm: LLM) -> int:
    """What tokens that wait for their commit take beside a worker's arena; nothing on CPUs."""
    [beside, *_] = llm.collective_rpc("get_bytes_beside", args=(None,))
    return int(beside.journals)


def generate(
    llm: LLM, token_ids: list[list[int]], max_tokens: int = NUM_TOKENS
) -> list[RequestOutput]:
    """Greedy outputs with the chosen token's logprob."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
    return llm.generate(batch, params, use_tqdm=False)


def assert_equals_reference(
    output: RequestOutput, model: str | Path, max_tokens: int = NUM_TOKENS
) -> None:
    """Tokens equal transformers' greedy ones; logprobs within 1e-4."""
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == max_tokens
    prompt = list(output.prompt_token_ids)
    logits = hf_reference_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert output.outputs[0].logprobs is not None
    got = [
        entry[token].logprob
        for entry, token in zip(output.outputs[0].logprobs, tokens, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(got), expected, rtol=0, atol=1e-4)


@torch.no_grad()
def assert_equals(output: RequestOutput, reference: PreTrainedModel) -> None:
    """Every token is the reference's choice given those before it, with its logprob."""
    prompt, (one,) = list(output.prompt_token_ids or []), output.outputs
    tokens = list(one.token_ids)
    logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1)
    for i, (token, entry) in enumerate(zip(tokens, one.logprobs or [], strict=True)):
        assert abs(entry[token].logprob - float(expected[i, token])) < 1e-4


def assert_extracted(make_engine: MakeEngine, family: str, storage: Path) -> None:
    """Captured streams are transformers'."""
    llm = make_engine(
        family,
        max_num_batched_tokens=64,
        **extraction(storage, [0, 2, 4]),
    )
    params = SamplingParams(temperature=0, max_tokens=1)
    (ids,) = prompts((90,))
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=ids)], params, use_tqdm=False)
    assert output.kv_transfer_params is not None
    found: Any = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
    streams = hf_residual_streams(tiny_model(family), ids)
    for i, layer in enumerate((0, 2, 4)):
        expected = streams[layer]
        difference = (found["hidden_states"][:90, i] - expected).abs().max()
        assert float(difference) < 5e-5 * float(expected.std())


def assert_ranks_extract_alike(
    make: Callable[..., LLM], folder: Path, bound: float, layout: str = "tp2"
) -> None:
    """The workers of a `layout` (`Layout.parse`) write each row once and whole, and as one rank
    computes it: up to `bound` of the rows' spread. `make(**settings)` gives an engine of the family
    qwen3_5."""

    def extract(layout: str) -> list[dict[str, torch.Tensor]]:
        storage = folder / layout
        llm = make(**Layout.parse(layout).flags, **extraction(storage, [0, 2, 4]))
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        batch = [TokensPrompt(prompt_token_ids=ids) for ids in prompts((5, 90, 33))]
        found = []
        for output in llm.generate(batch, params, use_tqdm=False):
            assert output.kv_transfer_params is not None
            found.append(load_hidden_states(output.kv_transfer_params["hidden_states_path"]))
        assert len(list(storage.glob("*.safetensors"))) == len(batch)
        return found

    for whole, shared in zip(extract("tp1"), extract(layout), strict=True):
        assert torch.equal(whole["token_ids"], shared["token_ids"])
        assert whole["hidden_states"].shape == (len(whole["token_ids"]), 3, 64)
        scale = float(whole["hidden_states"].std())
        difference = (whole["hidden_states"] - shared["hidden_states"]).abs().max()
        assert float(difference) < bound * scale
