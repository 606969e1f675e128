# SPDX-License-Identifier: Apache-2.0
"""Groups whose blocks are multiples of the hashed ones: hits end where all of them can continue."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_cases import BLOCK, done, full, generate, manager_of, recurrent, request, step, window

from vllm.config import CacheConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.prefix_cache import GroupPrefix
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec


def hit(manager: KVCacheManager, tokens: Any) -> int:
    manager.begin_step()
    return manager.get_computed_blocks(request("probe", tokens))[1]


@pytest.mark.parametrize(
    ("sizes", "num_same", "expected"),
    [((16, 32), 100, 96), ((16, 32), 80, 64), ((32, 48), 100, 96), ((32, 48), 95, 0)],
)
def test_whole_blocks_of_every_group(sizes: tuple[int, int], num_same: int, expected: int) -> None:
    manager = manager_of([full(block_size=size) for size in sizes], 50)
    done(manager, "a", range(100))
    assert hit(manager, [*range(num_same), *range(500, 540)]) == expected


def test_layers_of_several_compress_ratios() -> None:
    """One entry of 128 tokens is the least that all can share; a window shares its end alone."""
    row: Any = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [
        SlidingWindowMLASpec(**row, block_size=16, sliding_window=20),
        MLAAttentionSpec(**row, block_size=16, compress_ratio=4),
        MLAAttentionSpec(**row, block_size=128, compress_ratio=128),
    ]
    manager = manager_of(specs, 80)
    done(manager, "a", range(300))
    assert hit(manager, [*range(290), 1]) == 256
    second = request("b", [*range(290), 1])
    step(manager, second)
    window, sparse, dense = manager.get_block_ids("b")
    assert [bool(block) for block in window[:16]] == [False] * 14 + [True] * 2
    assert (len(sparse), len(dense)) == (19, 3)


def test_a_state_is_continued_inside_a_large_block() -> None:
    """Hits are exact: the large block's first tokens are copied."""
    manager = manager_of([full(block_size=64), window(20, block_size=32), recurrent()], 60)
    first = request("a", range(75))
    generate(manager, first, 7)
    manager.free(first)
    turn = first.all_token_ids[:81]
    assert hit(manager, [*turn, 1, 2, 3]) == 81
    second = request("b", [*turn, 1, 2, 3])
    copies = {(copy.group_id, copy.target) for copy in step(manager, second)}
    blocks = manager.get_block_ids("b")
    assert {(0, blocks[0][1]), (1, blocks[1][2]), (2, blocks[2][0])} <= copies


def test_the_receipt_counts_in_the_groups_own_blocks() -> None:
    manager = manager_of([full(), full(block_size=64)], 13)
    done(manager, "a", range(128))
    done(manager, "b", range(1000, 1080))  # evicts the end of the first
    probe = request("c", range(140))
    manager.begin_step()
    _, found = manager.get_computed_blocks(probe)
    report = manager.take_report(probe)
    assert report is not None and found < 128
    assert (report.cached_tokens + report.lost_tokens, report.reason) == (128, "evicted")


def test_hashes_are_those_of_the_prefixes_that_end_there() -> None:
    prefix = request("a", range(100))
    coarse = GroupPrefix(prefix, 48)
    assert list(coarse.block_hashes) == [prefix.prefix_hash(48), prefix.prefix_hash(96)]
    assert coarse.prefix_parent(97) == prefix.prefix_hash(96)
    assert coarse.prefix_parent(95) == prefix.prefix_hash(48)
    assert list(GroupPrefix(prefix, 48, 1).block_hashes) == [
        prefix.prefix_hash(49),
        prefix.prefix_hash(97),
    ]


@pytest.mark.parametrize("size", [BLOCK + 8, 0, -16])
def test_sizes_are_multiples_of_the_hashed_block(size: int) -> None:
    with pytest.raises(VLLMValidationError, match="multiples? of --block-size"):
        CacheConfig(block_sizes={"full_attention": size})
