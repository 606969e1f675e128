# SPDX-License-Identifier: Apache-2.0
"""Tiers that evict by ARC hold what the paper's algorithm holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.kv_transfer.test_offloading_parts import ATTENTION, cache_of, key
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.eviction import Arc, EvictionPolicy
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.tiers import Tier
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import MambaSpec

LARGE_STATE = MambaSpec(16, ((3, 8), (16, 32, 4)), (torch.float32, torch.float32))


class PaperArc:
    """Figure 4 of the paper, line by line; lists have their least recently used name first."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def replace(self, in_b2: bool) -> None:
        if self.t1 and ((in_b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def request(self, x: int) -> bool:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:  # case I
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
            return True
        if x in b1:  # case II
            self.p = min(c, self.p + max(len(b2) / len(b1), 1))
            self.replace(False)
            b1.remove(x)
            t2.append(x)
        elif x in b2:  # case III
            self.p = max(0, self.p - max(len(b1) / len(b2), 1))
            self.replace(True)
            b2.remove(x)
            t2.append(x)
        else:  # case IV
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    self.replace(False)
                else:
                    t1.pop(0)
            elif (total := len(t1) + len(t2) + len(b1) + len(b2)) >= c:
                if total == 2 * c:
                    b2.pop(0)
                self.replace(False)
            t1.append(x)
        return False


def request(tier: Tier, number: int, group: int = 0) -> bool:
    """Whether the tier has it; it does then, unless everything is in use."""
    name = key(number, group)
    known = tier.block_of(name)
    if known is not None:
        tier.refresh([known])
        return True
    block = tier.take(name)
    if block is not None:
        tier.publish(block, name, None)
        tier.free_blocks([block])
    return False


def names(policy: Arc) -> list[list[int]]:
    """T1, T2, B1, B2."""
    return [
        [int.from_bytes(name[:-4], "big") for name in each.names]
        for each in (policy.t1, policy.t2, policy.b1, policy.b2)
    ]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(st.one_of(st.integers(0, 5), st.integers(0, 20)), min_size=20, max_size=120),
)
def test_the_same_lists_as_the_paper(capacity: int, requests: list[int]) -> None:
    policy, paper = Arc(), PaperArc(capacity)
    plan = cache_of(ATTENTION).plan
    tier = Tier(plan, capacity, policy)
    for number in requests:
        assert request(tier, number) == paper.request(number)
        assert names(policy) == [paper.t1, paper.t2, paper.b1, paper.b2]
        assert abs(policy.p / plan.page_bytes - paper.p) < 1e-9


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32))
def test_blocks_of_several_sizes_that_are_held_or_wrong(num_pages: int, seed: int) -> None:
    """Bounds of the lists, whatever happens; and T1 and T2 are what the tier holds."""
    generator = random.Random(seed)
    plan = cache_of(ATTENTION, LARGE_STATE).plan
    assert plan.groups[0].blocks_per_page > plan.groups[1].blocks_per_page
    policy = Arc()
    tier = Tier(plan, num_pages, policy)
    held: list[KVCacheBlock] = []
    for _ in range(150):
        number, group, event = generator.randrange(12), generator.randrange(2), generator.random()
        block = tier.block_of(key(number, group))
        if event < 0.1 and block is not None:
            tier.touch([block])
            held.append(block)
        elif event < 0.25 and held:
            tier.free_blocks([held.pop(generator.randrange(len(held)))])
        elif event < 0.3 and block is not None:
            tier.uncache_block(block)
            assert key(number, group) not in policy.b1.names | policy.b2.names
        elif event < 0.35:
            taken = tier.take(key(number, group)) if block is None else None
            if taken is not None:  # what was to come did not
                tier.free_blocks([taken])
        else:
            request(tier, number, group)
        t1, t2, b1, b2 = (e.num_bytes for e in (policy.t1, policy.t2, policy.b1, policy.b2))
        capacity = num_pages * plan.page_bytes
        assert t1 + b1 <= capacity and t1 + t2 + b1 + b2 <= 2 * capacity
        assert 0 <= policy.p <= capacity
        assert policy.t1.names.keys() | policy.t2.names.keys() == tier._cached.keys()
        everything = sum(names(policy), [])
        assert len(everything) == len(policy.t1.names | policy.t2.names | policy.b1.names
                                      | policy.b2.names)  # fmt: skip
        assert sum(len(g.idle) for g in tier.pages.groups) == len(
            {b for b in tier._cached.values() if not b.ref_cnt}
        )
    tier.free_blocks(held)
    assert tier.reset_prefix_cache() and names(policy) == [[], [], [], []] and policy.p == 0
    assert tier.pages.num_free_pages == num_pages


def hits(policy: EvictionPolicy, requests: Sequence[int], num_pages: int) -> int:
    tier = Tier(cache_of(ATTENTION).plan, num_pages, policy)
    return sum(request(tier, number) for number in requests)


def test_prompts_seen_once_do_not_push_out_what_is_shared() -> None:
    """Five shared blocks, each used again, and 20 that are not between its uses."""
    once = iter(range(100, 10_000))
    requests: list[int] = []
    for number in range(100):
        requests += [number % 5, number % 5, *(next(once) for _ in range(4))]
    assert hits(EvictionPolicy(), requests, 10) == 100
    assert hits(Arc(), requests, 10) == 195


def test_policies_by_their_names() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.settings import OffloadingSettings

    def made(**extra: Any) -> type:
        return type(OffloadingSettings.of({"cpu_bytes_to_use": 9, **extra}).new_policy())

    assert made() is made(eviction_policy="lru") is EvictionPolicy
    assert made(eviction_policy="arc") is Arc
