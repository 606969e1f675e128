# SPDX-License-Identifier: Apache-2.0
"""Families whose attention differs from Llama's: fp32 greedy output equals transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity_checks import MakeEngine, assert_equals_reference, generate, prompts
from tiny_models import hf_residual_streams, tiny_model

from vllm import RequestOutput, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

pytestmark = [
    pytest.mark.parity,
    pytest.mark.parametrize("family", ["olmo_hybrid", "gemma3", "gpt_oss"]),
]

LENGTHS = (1, 16, 65, 130)
NUM_TOKENS = 24
#: of the arena where it is to be too small; hybrids' blocks hold more
BLOCKS = {"olmo_hybrid": 8, "gemma3": 16, "gpt_oss": 24}


def check(outputs: list[RequestOutput], family: str) -> None:
    for output in outputs:
        assert_equals_reference(output, tiny_model(family), max_tokens=NUM_TOKENS)


def test_batched_together(family: str, make_engine: MakeEngine) -> None:
    """In chunks of 17 tokens at most."""
    llm = make_engine(family, max_num_batched_tokens=17)
    check(generate(llm, prompts(LENGTHS), NUM_TOKENS), family)


def test_preempted_and_prefix_cached(family: str, make_engine: MakeEngine) -> None:
    """In an arena that is too small; then again, with what is left of the first round in it."""
    llm = make_engine(
        family,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=BLOCKS[family],
        disable_log_stats=False,
        max_model_len=192,
        enable_prefix_caching=True,
    )
    check(generate(llm, prompts((*LENGTHS, 120, 110, 100, 90)), NUM_TOKENS), family)
    preemptions = {m.name: m for m in llm.get_metrics()}["vllm:num_preemptions"]
    assert preemptions.value > 0, "the arena was large enough; the test shows nothing"
    (shared,) = prompts((100,), seed=2)
    for tail in ([], *prompts((1, 40), seed=1)):
        outputs = generate(llm, [shared + tail], NUM_TOKENS)
        check(outputs, family)
    assert (outputs[0].num_cached_tokens or 0) >= 96


def test_extracted(family: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    """Captured streams are transformers'."""
    llm = make_engine(
        family,
        max_num_batched_tokens=64,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
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
