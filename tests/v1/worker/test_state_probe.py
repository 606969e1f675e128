# SPDX-License-Identifier: Apache-2.0
"""Finding NaN where one row stands for several tokens."""

import numpy as np
import pytest
import torch

from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.worker.arena import Arena
from vllm.v1.worker.state_probe import GroupProbe

ROW = {"num_kv_heads": 1, "head_size": 24, "dtype": torch.float32}
ENTRIES = MLAAttentionSpec(**ROW, block_size=16, compress_ratio=4)
TOKENS = SlidingWindowMLASpec(**ROW, block_size=16, sliding_window=20)
GROUPS = [KVCacheGroupSpec(["e0", "e1"], ENTRIES), KVCacheGroupSpec(["t0"], TOKENS)]


@pytest.fixture
def arena() -> Arena:
    return Arena(KVCacheConfig(0, [], GROUPS, plan_arena(GROUPS, 6)), torch.device("cpu"))


def test_one_row_per_token_or_per_several(arena: Arena) -> None:
    assert [TOKENS.tokens_per_row, ENTRIES.tokens_per_row] == [1, 4]
    entries, tokens = arena.layers["e1"], arena.layers["t0"]
    assert isinstance(entries, torch.Tensor) and isinstance(tokens, torch.Tensor)
    assert entries.shape[1:] == (4, 24) and tokens.shape[1:] == (16, 24)


def test_a_row_is_looked_at_where_its_last_token_is(arena: Arena) -> None:
    probe = GroupProbe(arena, GROUPS[0], arena.plan.groups[0])
    block, offsets = 3, np.arange(16)
    probe.fill(np.array([block]))
    entries = arena.layers["e1"]
    assert isinstance(entries, torch.Tensor)
    for cache in (arena.layers["e0"], entries):
        assert isinstance(cache, torch.Tensor)
        cache[block, [0, 1, 3]] = 1.0
    entries[block, 3, 5] = torch.nan
    found = probe.nan_tokens(np.full(16, block), offsets)
    assert np.flatnonzero(found).tolist() == [11, 15]
    assert probe.first_nan(block, 11) == ("e0", True)
    assert probe.first_nan(block, 15) == ("e1", False)
