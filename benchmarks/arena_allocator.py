# SPDX-License-Identifier: Apache-2.0
"""Speed of the state-memory allocator: operations per second, as a Markdown table.

    python benchmarks/arena_allocator.py [--seconds 1]

A block operation is one block taken or given back; a scheduler operation is one `allocate_slots`
or `free`. The model is Qwen3.5-4B with three captured hidden states in 32 GiB.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator

import torch

from vllm.utils.hashing import sha256
from vllm.v1.core.arena_planner import plan_arena
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, get_request_block_hasher
from vllm.v1.kv_cache_interface import (
    ArenaPlan,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

ARENA_BYTES = 32 << 30
FULL = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=256, dtype=torch.bfloat16)
HIDDEN = HiddenStateCacheSpec(block_size=16, num_kv_heads=3, head_size=2560, dtype=torch.bfloat16)
GDN = MambaSpec(16, ((3, 8192), (32, 128, 128)), (torch.bfloat16, torch.float32))


def _groups(*, with_states: bool) -> list[KVCacheGroupSpec]:
    groups = [
        KVCacheGroupSpec([f"attn.{i}" for i in range(8)], FULL),
        KVCacheGroupSpec(["cache_only"], HIDDEN),
    ]
    if with_states:
        groups.append(KVCacheGroupSpec([f"gdn.{i}" for i in range(24)], GDN))
    return groups


def _plan(groups: list[KVCacheGroupSpec]) -> ArenaPlan:
    page_bytes = plan_arena(groups, 1).page_bytes
    return plan_arena(groups, ARENA_BYTES // page_bytes)


def _manager(*, with_states: bool) -> KVCacheManager:
    groups = _groups(with_states=with_states)
    plan = _plan(groups)
    config = KVCacheConfig(plan.num_pages, [], groups, plan)
    return KVCacheManager(config, 1 << 20, max_num_batched_tokens=8192, enable_caching=True)


def _blocks_without_cache() -> Iterator[int]:
    """Random requests of 1 to 200 attention blocks, as many hidden-state blocks and one state."""
    pool, rng = BlockPool(_plan(_groups(with_states=True))), random.Random(0)
    live: list[list[list[KVCacheBlock]]] = []
    while True:
        n = rng.randint(1, 200)
        demands = [n, n, 1]
        if len(live) < 256 and pool.can_allocate(demands):
            live.append(pool.get_new_blocks(demands, [None] * 3))
            yield 2 * n + 1
        else:
            index = rng.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            groups = live.pop()
            for blocks in groups:
                pool.free_blocks(reversed(blocks))
            yield sum(map(len, groups))


def _blocks_with_eviction() -> Iterator[int]:
    """Every block is cached when given back, so that taking one soon evicts another."""
    pool, rng = BlockPool(_plan(_groups(with_states=True))), random.Random(0)
    number = 0
    while True:
        n = rng.randint(1, 200)
        groups = pool.get_new_blocks([n, n, 1], [None] * 3)
        for blocks in groups[:2]:
            for block in blocks:
                number += 1
                pool.cache_block(block, BlockHash(number.to_bytes(32, "big")))
        for blocks in groups:
            pool.free_blocks(reversed(blocks))
        yield 2 * (2 * n + 1)


def _request(name: int, tokens: list[int]) -> Request:
    hasher = get_request_block_hasher(16, sha256)
    return Request(str(name), tokens, None, block_hasher=hasher)


def _decode() -> Iterator[int]:
    """256 requests with 1,000 tokens each decode for 200 steps, then start again."""
    while True:
        manager = _manager(with_states=True)
        requests = [_request(i, list(range(1000))) for i in range(256)]
        for request in requests:
            assert manager.allocate_slots(request, 1000) is not None
            request.num_computed_tokens = 1000
        yield 0
        for _ in range(200):
            for request in requests:
                assert manager.allocate_slots(request, 1) is not None
                request.num_computed_tokens += 1
            yield len(requests)


def _prefix_hits() -> Iterator[int]:
    """Admit and free requests that share 1,024 of 1,100 tokens."""
    manager = _manager(with_states=False)
    shared = list(range(1024))
    requests = [_request(i, shared + [i] * 76) for i in range(64)]
    while True:
        for request in requests:
            blocks, hit = manager.get_computed_blocks(request)
            new = request.num_tokens - hit
            assert manager.allocate_slots(request, new, hit, blocks) is not None
            request.num_computed_tokens = request.num_tokens
            manager.free(request)
            request.num_computed_tokens = 0
        yield 2 * len(requests)


def _rate(make: Callable[[], Iterator[int]], seconds: float) -> float:
    """Operations per second of the part between two yields; what precedes a 0 is not counted."""
    steps, operations, spent = make(), 0, 0.0
    next(steps)
    while spent < seconds:
        start = time.perf_counter()
        done = next(steps)
        if done:
            spent += time.perf_counter() - start
            operations += done
    return operations / spent


CASES: dict[str, Callable[[], Iterator[int]]] = {
    "blocks, random requests, nothing cached": _blocks_without_cache,
    "blocks, every block cached and evicted": _blocks_with_eviction,
    "scheduler: decode step of one request": _decode,
    "scheduler: admit with a 64-block hit, and free": _prefix_hits,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time per case")
    seconds = parser.parse_args().seconds
    print("| Operation | per second |\n|---|---|")
    for name, make in CASES.items():
        print(f"| {name} | {_rate(make, seconds):,.0f} |")


if __name__ == "__main__":
    main()
