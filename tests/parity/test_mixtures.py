# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in an engine: fp32 greedy output equals transformers' token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity_checks import (
    MakeEngine,
    assert_equals_reference,
    assert_extracted,
    generate,
    one_replica,
    prompts,
)
from tiny_models import tiny_model

from vllm import RequestOutput

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parity,
    pytest.mark.parametrize(
        "family", ["mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "kimi_linear"]
    ),
]

LENGTHS = (1, 16, 65, 130)
NUM_TOKENS = 24
#: of the arena where it is to be too small; hybrids' blocks hold more
BLOCKS = {"mixtral": 16, "qwen3_moe": 16, "qwen3_next": 8, "qwen3_5_moe": 8, "kimi_linear": 8}


def check(outputs: list[RequestOutput], family: str) -> None:
    for output in outputs:
        assert_equals_reference(output, tiny_model(family), max_tokens=NUM_TOKENS)


def test_batched_together(family: str, make_engine: MakeEngine) -> None:
    """In chunks of 17 tokens at most."""
    llm = make_engine(family, max_num_batched_tokens=17)
    check(generate(llm, prompts(LENGTHS), NUM_TOKENS), family)


@one_replica
def test_preempted(family: str, make_engine: MakeEngine) -> None:
    llm = make_engine(
        family,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=BLOCKS[family],
        disable_log_stats=False,
        max_model_len=192,
    )
    check(generate(llm, prompts((*LENGTHS, 120, 110, 100, 90)), NUM_TOKENS), family)
    preemptions = {m.name: m for m in llm.get_metrics()}["vllm:num_preemptions"]
    assert preemptions.value > 0, "the arena was large enough; the test shows nothing"


def test_prefix_cached(family: str, make_engine: MakeEngine) -> None:
    llm = make_engine(family, max_num_batched_tokens=64, enable_prefix_caching=True)
    (shared,) = prompts((100,))
    batch = [shared + tail for tail in prompts((1, 40), seed=1)]
    for _ in range(2):
        outputs = generate(llm, batch, NUM_TOKENS)
        check(outputs, family)
    assert min(output.num_cached_tokens or 0 for output in outputs) >= 96


def test_extracted(family: str, make_engine: MakeEngine, tmp_path: Path) -> None:
    assert_extracted(make_engine, family, tmp_path)
