# SPDX-License-Identifier: Apache-2.0
"""The figures in docs/state_memory.md are what the code computes."""

from pathlib import Path

import pytest
from state_cases import full, hidden, recurrent, vllm_config

from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs

GUIDE = (Path(__file__).parents[3] / "docs" / "state_memory.md").read_text(encoding="utf-8")
WORDS = " ".join(GUIDE.split())
CONFIG = vllm_config(max_model_len=32768, max_num_batched_tokens=8192)


def qwen35_4b(*, capture: bool):
    specs = {f"layers.{i}": full() if i % 4 == 3 else recurrent() for i in range(32)}
    if capture:
        specs["cache_only_layers.0"] = hidden()
    (config,) = get_kv_cache_configs(CONFIG, [specs], [100 << 30])
    return config


def test_group_table():
    config = qwen35_4b(capture=False)
    plan = config.plan
    for group_id, name in enumerate(("recurrent, 24 layers", "attention, 8 layers")):
        group = plan.groups[group_id]
        row = (
            f"| {name} | {group.block_bytes:,} | {group.blocks_per_page} | "
            f"{plan.block_stride(group_id):,} | {100 * plan.padding(group_id):.2f} % |"
        )
        assert row in GUIDE
    assert f"has {plan.page_bytes:,} bytes, the arena {plan.num_pages:,} of them" in WORDS
    tokens, concurrency = get_kv_cache_capacity(CONFIG, config)
    assert (
        f"{int(concurrency)} requests of 32,768 tokens run at once; in all, {tokens:,} tokens"
        in WORDS
    )


@pytest.mark.parametrize("num_tokens", [12, 1000, 32768])
def test_request_table(num_tokens):
    config = qwen35_4b(capture=False)
    blocks = [
        group.kv_cache_spec.blocks_per_request(8192, num_tokens) for group in config.kv_cache_groups
    ]
    size = sum(n * config.plan.block_stride(g) for g, n in enumerate(blocks))
    assert f"| {num_tokens:,} | {blocks[0]} | {blocks[1]:,} | {size:,} |" in GUIDE


def test_capture_paragraph():
    config = qwen35_4b(capture=True)
    plan = config.plan
    counts = [group.blocks_per_page for group in plan.groups]
    paddings = [f"{100 * plan.padding(g):.2f} %" for g in range(3)]
    _, concurrency = get_kv_cache_capacity(CONFIG, config)
    assert (
        f"The page becomes {plan.page_bytes:,} bytes ({counts[0]}, {counts[1]} and {counts[2]} "
        f"blocks), the paddings {paddings[0]}, {paddings[1]} and {paddings[2]}, and "
        f"{int(concurrency)} requests of 32,768 tokens fit."
    ) in WORDS
