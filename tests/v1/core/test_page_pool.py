# SPDX-License-Identifier: Apache-2.0
"""The allocator's order: own pages, free pages, eviction; and what it refuses."""

import random

import pytest
from state_cases import plan_of

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash


def pool_of(*blocks_per_page: int, num_pages: int) -> BlockPool:
    return BlockPool(plan_of(*blocks_per_page, num_pages=num_pages))


def take(pool, *demands, near=None):
    return pool.get_new_blocks(demands, near or [None] * len(demands))


def cache(pool, blocks, name):
    for i, block in enumerate(blocks):
        pool.cache_block(block, BlockHash(f"{name}{i}".encode()))


def ids(blocks):
    return [block.block_id for block in blocks]


def test_null_page_is_never_lent():
    pool = pool_of(1, 4, num_pages=4)
    one, many = take(pool, 1, 8)
    assert min(ids(one)) >= 1
    assert min(ids(many)) >= 4
    assert not pool.can_allocate([1, 0])
    assert not pool.can_allocate([0, 1])
    assert (pool.null_block.block_id, pool.null_block.is_null) == (0, True)


def test_pages_are_filled_before_others_are_opened():
    pool = pool_of(4, num_pages=10)
    first = take(pool, 3)[0]
    second = take(pool, 3)[0]
    assert ids(first) == [4, 5, 6]
    assert ids(second) == [7, 8, 9]
    assert pool.pages.num_free_pages == 7


def test_fullest_page_first():
    pool = pool_of(4, num_pages=10)
    first, second = take(pool, 4)[0], take(pool, 4)[0]
    pool.free_blocks(first[1:])
    pool.free_blocks(second[:1])
    assert ids(take(pool, 1)[0]) == ids(second[:1])
    assert take(pool, 1)[0][0].block_id in ids(first[1:])


def test_the_requests_own_page_comes_before_a_fuller_one():
    pool = pool_of(4, num_pages=10)
    first, second = take(pool, 4)[0], take(pool, 4)[0]
    pool.free_blocks(first[1:])
    pool.free_blocks(second[:1])
    got = take(pool, 2, near=[first[0]])[0]
    assert set(ids(got)) < set(ids(first[1:]))


def test_empty_page_goes_back_and_serves_another_group():
    pool = pool_of(2, 3, num_pages=2)
    mine = take(pool, 2, 0)[0]
    assert not pool.can_allocate([0, 1])
    pool.free_blocks(mine[:1])
    assert not pool.can_allocate([0, 1])
    pool.free_blocks(mine[1:])
    assert pool.can_allocate([0, 3])
    assert ids(take(pool, 0, 3)[1]) == [3, 4, 5]


def test_free_page_before_eviction():
    pool = pool_of(2, num_pages=3)
    old = take(pool, 2)[0]
    cache(pool, old, "old")
    pool.free_blocks(old)
    new = take(pool, 2)[0]
    assert ids(new) == [4, 5]
    assert pool.num_cached_blocks == 2


def test_least_recently_used_block_is_evicted():
    pool = pool_of(1, num_pages=4)
    blocks = take(pool, 3)[0]
    cache(pool, blocks, "x")
    pool.free_blocks([blocks[1], blocks[0], blocks[2]])
    pool.touch([blocks[1]])
    pool.free_blocks([blocks[1]])
    assert ids(take(pool, 1)[0]) == ids(blocks[:1])
    assert ids(take(pool, 1)[0]) == ids(blocks[2:])
    assert pool.get_cached_block(BlockHash(b"x1"), 0) is blocks[1]
    assert pool.get_cached_block(BlockHash(b"x0"), 0) is None


def test_oldest_idle_page_of_another_group_is_evicted():
    pool = pool_of(1, 2, num_pages=3)
    older, newer = take(pool, 0, 2)[1], take(pool, 0, 2)[1]
    cache(pool, older, "older")
    cache(pool, newer, "newer")
    pool.free_blocks(older + newer)
    (block,) = take(pool, 1, 0)[0]
    assert block.page == older[0].page
    assert pool.get_cached_block(BlockHash(b"older0"), 1) is None
    assert pool.get_cached_block(BlockHash(b"newer0"), 1) is newer[0]


def test_own_old_block_before_a_younger_page():
    pool = pool_of(1, 2, num_pages=3)
    mine = take(pool, 1, 0)[0]
    other = take(pool, 0, 2)[1]
    cache(pool, mine, "mine")
    cache(pool, other, "other")
    pool.free_blocks(mine)
    pool.free_blocks(other)
    assert ids(take(pool, 1, 0)[0]) == ids(mine)
    assert pool.num_cached_blocks == 2


def test_older_page_of_another_group_before_an_own_young_block():
    pool = pool_of(1, 2, num_pages=3)
    mine = take(pool, 1, 0)[0]
    other = take(pool, 0, 2)[1]
    cache(pool, mine, "mine")
    cache(pool, other, "other")
    pool.free_blocks(other)
    pool.free_blocks(mine)
    assert take(pool, 1, 0)[0][0].page == other[0].page
    assert pool.get_cached_block(BlockHash(b"mine0"), 0) is mine[0]


def test_own_old_block_in_a_pinned_page_before_a_younger_page():
    pool = pool_of(2, 1, num_pages=3)
    mine = take(pool, 2, 0)[0]
    other = take(pool, 0, 1)[1]
    cache(pool, mine, "mine")
    cache(pool, other, "other")
    pool.free_blocks(mine[:1])
    pool.free_blocks(other)
    assert ids(take(pool, 1, 0)[0]) == ids(mine[:1])
    assert pool.get_cached_block(BlockHash(b"other0"), 1) is other[0]


def test_partly_filled_idle_page_before_a_free_page():
    pool = pool_of(3, num_pages=5)
    old = take(pool, 3)[0]
    cache(pool, old[:1], "x")
    pool.free_blocks(old)
    assert {block.page for block in take(pool, 2)[0]} == {old[0].page}
    assert pool.num_cached_blocks == 1


def test_page_with_a_live_block_is_pinned_for_others_but_not_for_its_group():
    pool = pool_of(1, 2, num_pages=2)
    mine = take(pool, 0, 2)[1]
    cache(pool, mine, "x")
    pool.free_blocks(mine[:1])
    assert not pool.can_allocate([1, 0])
    assert ids(take(pool, 0, 1)[1]) == ids(mine[:1])


def test_groups_do_not_take_each_others_last_page():
    """Group 0 would like the idle page, which group 1 cannot do without."""
    pool = pool_of(2, 1, num_pages=4)
    a = take(pool, 2, 0)[0]
    cache(pool, a, "a")
    pinned = take(pool, 2, 0)[0]
    cache(pool, pinned, "p")
    filler = take(pool, 0, 1)[1]
    pool.free_blocks([a[1], a[0], pinned[1]])  # page of `a` idle and oldest
    got = take(pool, 1, 1)
    assert ids(got[0]) == [pinned[1].block_id]
    assert got[1][0].page == a[0].page
    assert filler[0].ref_cnt == 1


def test_refusal_is_atomic():
    pool = pool_of(1, 2, num_pages=3)
    old = take(pool, 1, 0)[0]
    cache(pool, old, "x")
    pool.free_blocks(old)
    assert not pool.can_allocate([2, 1])
    with pytest.raises(RuntimeError, match="cannot give"):
        take(pool, 2, 1)
    assert pool.get_cached_block(BlockHash(b"x0"), 0) is old[0]
    assert pool.pages.num_live_blocks == 0


def test_hits_count_as_taken():
    pool = pool_of(1, 2, num_pages=3)
    page = take(pool, 0, 2)[1]
    cache(pool, page, "x")
    pool.free_blocks(page)
    assert pool.can_allocate([2, 0])
    assert not pool.can_allocate([2, 0], hits=page[:1])
    assert pool.can_allocate([1, 1], hits=page[:1])
    assert not pool.can_allocate([1, 2], hits=page[:1])
    assert pool.can_allocate([1, 0], hits=page)
    assert not pool.can_allocate([1, 0], hits=page, keep_pages=1)
    assert pool.can_allocate([0, 0], hits=page, keep_pages=1)


def test_references_are_counted():
    pool = pool_of(2, num_pages=2)
    (block,) = take(pool, 1)[0]
    cache(pool, [block], "x")
    pool.touch([block])
    pool.free_blocks([block])
    assert pool.usage == 0.5
    pool.free_blocks([block])
    assert pool.usage == 0.0
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.free_blocks([block])


def test_usage_counts_bytes_of_live_blocks():
    pool = pool_of(1, 4, num_pages=5)
    assert pool.usage == 0.0
    one, many = take(pool, 1, 2)
    assert pool.usage == (1 + 2 / 4) / 4
    cache(pool, many, "x")
    pool.free_blocks(many)
    assert pool.usage == 1 / 4
    assert pool_of(1, num_pages=1).usage == 0.0


def test_same_content_is_cached_once():
    pool = pool_of(1, num_pages=4)
    one, two = take(pool, 2)[0]
    pool.cache_block(one, BlockHash(b"same"))
    pool.cache_block(two, BlockHash(b"same"))
    assert pool.get_cached_block(BlockHash(b"same"), 0) is one
    assert two.block_hash is None
    pool.free_blocks([two])
    assert pool.pages.num_free_pages == 2


def test_groups_do_not_see_each_others_content():
    pool = pool_of(1, 1, num_pages=4)
    (mine,), _ = take(pool, 1, 1)
    pool.cache_block(mine, BlockHash(b"x"))
    assert pool.get_cached_block(BlockHash(b"x"), 1) is None


def test_evict_blocks_by_id_in_every_group():
    pool = pool_of(2, 2, num_pages=4)
    a, b = take(pool, 2, 2)
    cache(pool, a, "a")
    cache(pool, b, "b")
    pool.free_blocks(a)
    pool.evict_blocks([0, a[0].block_id, b[1].block_id, 10_000])
    assert pool.get_cached_block(BlockHash(b"a0"), 0) is None
    assert pool.get_cached_block(BlockHash(b"a1"), 0) is a[1]
    assert pool.get_cached_block(BlockHash(b"b1"), 1) is None
    assert b[1].ref_cnt == 1
    pool.evict_blocks([a[1].block_id])
    assert pool.pages.num_free_pages == 2, "an idle page left without content goes back"


def test_reset_only_without_live_blocks():
    pool = pool_of(2, num_pages=4)
    a, b = take(pool, 2)[0], take(pool, 1)[0]
    cache(pool, a, "a")
    pool.free_blocks(a)
    assert pool.reset_prefix_cache() is False
    assert pool.num_cached_blocks == 2
    pool.free_blocks(b)
    assert pool.reset_prefix_cache() is True
    assert pool.num_cached_blocks == 0
    assert pool.pages.num_free_pages == 3


def evictions(pool, blocks):
    """The order in which new blocks take the places of these."""
    order = []
    while not all(not block.is_cached for block in blocks):
        cached = [block for block in blocks if block.is_cached]
        take(pool, 1)
        order += [block.block_id for block in cached if not block.is_cached]
    return order


@pytest.mark.parametrize("seed", range(8))
def test_refreshed_blocks_are_ordered_as_if_they_had_been_held(seed):
    """Pages of several blocks, some of them held by others meanwhile."""
    chance = random.Random(seed)
    chosen = [chance.sample(range(24), chance.randrange(1, 24)) for _ in range(4)]
    held = chance.sample(range(24), 3)
    orders = []
    for at_once in (True, False):
        pool = pool_of(4, num_pages=7)
        blocks = take(pool, 24)[0]
        cache(pool, blocks, "x")
        pool.free_blocks(blocks)
        pool.touch([blocks[i] for i in held])
        for indices in chosen:
            mine = [blocks[i] for i in indices]
            if at_once:
                pool.pages.refresh(mine)
                continue
            for block in mine:
                pool.touch([block])
                pool.free_blocks([block])
        pool.free_blocks([blocks[i] for i in held])
        orders.append(evictions(pool, blocks))
    assert orders[0] == orders[1] and len(orders[0]) == 24


@pytest.mark.parametrize("seed", range(8))
def test_blocks_held_and_released_together_are_ordered_as_if_one_by_one(seed):
    """Some are held twice, and some hold nothing that the cache could find."""
    chance = random.Random(seed)
    chosen = [chance.sample(range(24), chance.randrange(1, 24)) for _ in range(4)]
    nameless = chance.sample(range(24), 3)
    orders = []
    for at_once in (True, False):
        pool = pool_of(4, num_pages=7)
        blocks = take(pool, 24)[0]
        cache(pool, [block for i, block in enumerate(blocks) if i not in nameless], "x")
        pool.free_blocks([blocks[i] for i in range(24) if i not in nameless])
        for indices in chosen:
            for each in [indices] if at_once else [[i] for i in indices]:
                pool.touch([blocks[i] for i in each])
        assert pool.pages.num_live_blocks == len({*nameless, *(i for c in chosen for i in c)})
        assert not pool.can_allocate([24])
        for indices in (*chosen, nameless):
            for each in [indices] if at_once else [[i] for i in indices]:
                pool.free_blocks([blocks[i] for i in each])
        assert not pool.pages.num_live_blocks and pool.can_allocate([24])
        orders.append(evictions(pool, blocks))
    assert orders[0] == orders[1] and len(orders[0]) == 24 - len(nameless)


def test_look_ups_of_many_blocks():
    """Of one group blocks 0, 1 and 3 are there, of the other tails after blocks 1 and 3."""
    pool = pool_of(4, 1, num_pages=9)
    full, states = take(pool, 3, 2)
    names = [BlockHash(f"x{i}".encode()) for i in range(5)]
    for block, i in zip(full, (0, 1, 3), strict=True):
        pool.cache_block(block, names[i])
    assert pool.get_cached_run(names, 0) == full[:2]
    assert pool.get_cached_run(names[2:], 0) == pool.get_cached_run(names, 1) == []
    for block, i in zip(states, (1, 3), strict=True):
        pool.cache_tail(block, BlockHash(f"tail {i}".encode()), names[i], 7)
    assert list(pool.followed_by_tails(names, 1)) == [3, 1]
    assert list(pool.followed_by_tails(names[:3], 1)) == [1]
    assert list(pool.followed_by_tails(names, 0)) == []
