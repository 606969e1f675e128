# SPDX-License-Identifier: Apache-2.0
"""The journal tells workers which blocks are free, in the order in which it happened."""

from __future__ import annotations

import random

import pytest
from state_cases import full, manager_of, plan_of, recurrent, request, run, step

from vllm.v1.core.block_journal import BlockJournal
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.sched.output import BlockCopy, BlocksFreed, BlocksTaken


def journaled(*capacities: int, num_pages: int) -> tuple[BlockPool, BlockJournal]:
    pool = BlockPool(plan_of(*capacities, num_pages=num_pages))
    pool.pages.journal = BlockJournal()
    return pool, pool.pages.journal


def test_nothing_is_recorded_unless_asked_for() -> None:
    manager = manager_of([full(), recurrent()], 9)
    step(manager, request("a", range(20)))
    assert manager.take_block_log() is None


def test_neighbouring_entries_of_a_group_are_one() -> None:
    pool, journal = journaled(2, 3, num_pages=9)
    first, second = pool.get_new_blocks([3, 2], [None, None])
    pool.free_blocks(second + first)
    ids, others = [b.block_id for b in first], [b.block_id for b in second]
    assert journal.take() == [
        BlocksTaken(0, ids, [1, 1, 1]),
        BlocksTaken(1, others, [1, 1]),
        BlocksFreed(1, others),
        BlocksFreed(0, ids),
    ]
    assert journal.take() == []


def test_every_use_of_a_block_has_its_own_generation() -> None:
    pool, journal = journaled(1, num_pages=2)
    for generation in (1, 2, 3):
        ((block,),) = pool.get_new_blocks([1], [None])
        pool.free_blocks([block])
        assert journal.take() == [
            BlocksTaken(0, [1], [generation]),
            BlocksFreed(0, [1]),
        ]


def test_groups_in_the_place_of_others_are_used_anew() -> None:
    pool, journal = journaled(1, 1, num_pages=2)

    def generation(group_id: int) -> int:
        demands = [int(group_id == i) for i in range(2)]
        blocks = pool.get_new_blocks(demands, [None, None])[group_id]
        pool.free_blocks(blocks)
        taken, freed = journal.take()
        assert isinstance(taken, BlocksTaken) and freed == BlocksFreed(group_id, [1])
        assert (taken.group_id, taken.block_ids) == (group_id, [1])
        return taken.generations[0]

    assert [generation(i) for i in (0, 1, 0, 1)] == [1, 1, 2, 2]
    pool.pages.set_groups(1, [1])
    assert [generation(i) for i in (0, 1, 0, 1)] == [3, 1, 4, 2]


def test_cached_content_is_not_free_until_it_is_evicted() -> None:
    pool, journal = journaled(1, num_pages=2)
    ((block,),) = pool.get_new_blocks([1], [None])
    pool.cache_block(block, BlockHash(b"a"))
    pool.free_blocks([block])
    assert journal.take() == [BlocksTaken(0, [1], [1])]
    pool.get_new_blocks([1], [None])
    assert journal.take() == [BlocksFreed(0, [1]), BlocksTaken(0, [1], [2])]


def test_a_page_goes_to_another_group_with_its_blocks_freed() -> None:
    pool, journal = journaled(2, 1, num_pages=2)
    (blocks, _) = pool.get_new_blocks([2, 0], [None, None])
    for i, block in enumerate(blocks):
        pool.cache_block(block, BlockHash(bytes([i])))
    pool.free_blocks(blocks)
    journal.take()
    pool.get_new_blocks([0, 1], [None, None])
    freed, taken = journal.take()
    assert freed == BlocksFreed(0, [2, 3]) and taken == BlocksTaken(1, [1], [1])


def test_a_source_evicted_after_its_copy_was_planned() -> None:
    """Its block is handed out again within the step: the copy must come first."""
    manager = manager_of([recurrent(), full()], num_pages=12, sanitize=True)
    first = request("first", range(33))
    while first.num_computed_tokens < 33:
        step(manager, first)
    manager.free(first)
    manager.begin_step()
    manager.take_block_log()
    again = request("again", [*range(33), 99])
    copies = step(manager, again)
    pages = manager.block_pool.pages.num_unpinned_pages
    assert run(manager, request("other", range(200, 200 + 16 * (pages - 1))))
    log = manager.take_block_log()
    assert log is not None
    copy = next(entry for entry in log if isinstance(entry, BlockCopy))
    assert copy in copies
    later = log[log.index(copy) + 1 :]
    freed = next(
        i for i, e in enumerate(later) if isinstance(e, BlocksFreed) and copy.source in e.block_ids
    )
    # With one block per page, ids of all groups are page numbers.
    taken = [entry for entry in later[freed:] if isinstance(entry, BlocksTaken)]
    assert any(copy.source in entry.block_ids for entry in taken)


@pytest.mark.parametrize("seed", range(20))
def test_replaying_the_log_gives_the_free_blocks(seed: int) -> None:
    """Random use of a pool: at any time the blocks in use are those that are live or cached."""
    rng = random.Random(seed)
    capacities = rng.choices([1, 2, 3, 5], k=rng.randint(1, 3))
    pool, journal = journaled(*capacities, num_pages=rng.randint(2, 8))
    in_use: dict[tuple[int, int], int] = {}
    generations: dict[tuple[int, int], int] = {}
    held: list[KVCacheBlock] = []
    for name in range(200):
        demands = [rng.randint(0, 2) for _ in capacities]
        if rng.random() < 0.5 and pool.can_allocate(demands):
            for blocks in pool.get_new_blocks(demands, [None] * len(demands)):
                held += blocks
                for i, block in enumerate(blocks):
                    if rng.random() < 0.5:
                        pool.cache_block(block, BlockHash(bytes([name % 256, i])))
        elif held:
            pool.free_blocks([held.pop(rng.randrange(len(held)))])
        for entry in journal.take():
            assert not isinstance(entry, BlockCopy)
            for i, block_id in enumerate(entry.block_ids):
                key = entry.group_id, block_id
                if isinstance(entry, BlocksTaken):
                    assert key not in in_use
                    assert entry.generations[i] == generations.get(key, 0) + 1
                    in_use[key] = generations[key] = entry.generations[i]
                else:
                    del in_use[key]
        idle = {(b.group_id, b.block_id) for group in pool.pages.groups for b in group.idle}
        assert set(in_use) == {(b.group_id, b.block_id) for b in held} | idle
