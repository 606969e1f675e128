# SPDX-License-Identifier: Apache-2.0
"""Kinds of state with blocks of their own size: the same tokens, from the cache too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_checks import MakeEngine, assert_equals_reference, generate, prompts
from tiny_models import tiny_model

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

pytestmark = pytest.mark.parity

EXTRACTION: dict[str, Any] = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}},
}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_5", {"full_attention": 64}),
        ("qwen3_sliding", {"sliding_window": 32}),
        ("qwen3_sliding", {"sliding_window": 16, "full_attention": 48}),
    ],
)
def test_greedy_tokens_and_hits(
    family: str, sizes: dict[str, int], make_engine: MakeEngine
) -> None:
    """Two turns in chunks, the second from the cache, every use of state memory checked."""
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "sanitize": True}
    llm = make_engine(family, enable_prefix_caching=True, block_sizes=sizes, **options)
    turns = prompts((15, 64, 150))
    for turn in range(2):
        outputs = generate(llm, turns, max_tokens=8)
        for output in outputs:
            assert_equals_reference(output, tiny_model(family), max_tokens=8)
        if turn:
            assert all(output.num_cached_tokens for output in outputs[1:])
        turns = [
            [*prompt, *output.outputs[0].token_ids, *more]
            for prompt, output, more in zip(turns, outputs, prompts((9, 30, 1), 5), strict=True)
        ]


def test_captured_rows_in_larger_blocks(make_engine: MakeEngine, tmp_path: Path) -> None:
    (prompt,) = prompts((100,))
    found = []
    for name, sizes in (("equal", {}), ("larger", {"hidden_states": 48, "full_attention": 32})):
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / name)},
        }
        llm = make_engine(
            "qwen3_5",
            enable_prefix_caching=True,
            max_num_batched_tokens=64,
            block_sizes=sizes,
            speculative_config=EXTRACTION,
            kv_transfer_config=transfer,
        )
        for _ in range(2):
            (output,) = generate(llm, [prompt], max_tokens=1)
            assert output.kv_transfer_params is not None
            path = output.kv_transfer_params["hidden_states_path"]
            found.append(load_hidden_states(path)["hidden_states"])
        assert output.num_cached_tokens
    assert found[0].shape[0] == 100
    for rows in found[1:]:
        torch.testing.assert_close(rows, found[0], rtol=0, atol=1e-5)
