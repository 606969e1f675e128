# SPDX-License-Identifier: Apache-2.0
"""Random mixes of groups against a model that knows only who holds what."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from state_cases import plan_of

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash

ZERO_TO_NINE = st.integers(0, 9)


class PoolMachine(RuleBasedStateMachine):
    """`owners`: for every holder the blocks it holds."""

    pool = None

    @initialize(
        capacities=st.lists(st.sampled_from([1, 1, 2, 3, 5, 8]), min_size=1, max_size=4),
        num_pages=st.integers(2, 9),
    )
    def start(self, capacities, num_pages):
        self.capacities = capacities
        self.num_pages = num_pages
        self.pool = BlockPool(plan_of(*capacities, num_pages=num_pages))
        self.owners = {}
        self.next_name = 0

    # ---- the model -----------------------------------------------------------------------------

    def references(self):
        return Counter(block for blocks in self.owners.values() for block in blocks)

    def possible(self, demands, hits=()):
        """The definition: a page with a live block serves its group only, any other page any."""
        live = {(b.group_id, b.block_id) for b in self.references()}
        live |= {(b.group_id, b.block_id) for b in hits}
        page_group = {block_id // self.capacities[g]: g for g, block_id in live}
        rest = list(demands)
        for g in range(len(rest)):
            pages = [page for page, group in page_group.items() if group == g]
            held = sum(1 for group, _ in live if group == g)
            rest[g] = max(0, rest[g] - (len(pages) * self.capacities[g] - held))
        pages = sum(-(-n // r) for n, r in zip(rest, self.capacities, strict=True))
        return pages <= self.num_pages - 1 - len(page_group)

    def state(self):
        pages = self.pool.pages
        return (
            dict(self.pool._cached),
            [list(group.idle) for group in pages.groups],
            [page.index for page in pages._idle_pages],
            list(pages._returned),
            pages._first_unused,
            [p and (p.group.group_id, p.live, p.idle, list(p.spare)) for p in pages._pages],
        )

    def hold(self, blocks):
        self.owners[self.next_name] = blocks
        self.next_name += 1

    def pick(self, choice):
        return sorted(self.owners)[choice % len(self.owners)] if self.owners else None

    # ---- what can happen -----------------------------------------------------------------------

    @rule(data=st.data())
    def take(self, data):
        demands = [data.draw(ZERO_TO_NINE) for _ in self.capacities]
        near = [None] * len(demands)
        owner = self.pick(data.draw(ZERO_TO_NINE))
        for block in self.owners.get(owner, ()):
            near[block.group_id] = block
        before = self.state()
        expected = self.possible(demands)
        assert self.pool.can_allocate(demands) == expected
        if not expected:
            with pytest.raises(RuntimeError):
                self.pool.get_new_blocks(demands, near)
            assert self.state() == before
            return
        taken = self.pool.get_new_blocks(demands, near)
        held = {(b.group_id, b.block_id) for b in self.references()}
        for group_id, blocks in enumerate(taken):
            assert len(blocks) == demands[group_id]
            for block in blocks:
                assert block.group_id == group_id
                assert block.block_hash is None
                assert (group_id, block.block_id) not in held
        self.hold([block for blocks in taken for block in blocks])

    @rule(choice=ZERO_TO_NINE, part=st.integers(0, 3))
    def cache(self, choice, part):
        name = self.pick(choice)
        for i, block in enumerate(self.owners.get(name, ())):
            if part == 0 or i % (part + 1):
                self.pool.cache_block(block, BlockHash(f"{name}/{i}".encode()))

    @rule(choice=ZERO_TO_NINE)
    def release(self, choice):
        name = self.pick(choice)
        if name is not None:
            self.pool.free_blocks(reversed(self.owners.pop(name)))

    @rule(data=st.data())
    def hit_and_take(self, data):
        cached = sorted(self.pool._cached)
        if not cached:
            return
        keys = data.draw(st.lists(st.sampled_from(cached), max_size=6, unique=True))
        hits = [self.pool._cached[key] for key in keys]
        demands = [data.draw(st.integers(0, 4)) for _ in self.capacities]
        expected = self.possible(demands, hits)
        assert self.pool.can_allocate(demands, hits) == expected
        if expected:
            self.pool.touch(hits)
            taken = self.pool.get_new_blocks(demands, [None] * len(demands))
            assert [self.pool._cached[key] for key in keys] == hits, "a held block was evicted"
            self.hold(hits + [block for blocks in taken for block in blocks])

    @rule(ids=st.lists(st.integers(0, 40), max_size=4))
    def evict(self, ids):
        self.pool.evict_blocks(ids)
        assert not [b for b in self.pool._cached.values() if b.block_id in ids]

    @rule()
    def reset(self):
        assert self.pool.reset_prefix_cache() == (not self.references())

    # ---- what must hold ------------------------------------------------------------------------

    @invariant()
    def references_match(self):
        for block, count in self.references().items():
            assert block.ref_cnt == count

    @invariant()
    def live_bytes_do_not_overlap(self):
        page_groups = {}
        seen = set()
        for block in self.references():
            page = block.block_id // self.capacities[block.group_id]
            assert page == block.page >= 1
            assert page_groups.setdefault(page, block.group_id) == block.group_id
            assert (block.group_id, block.block_id) not in seen
            seen.add((block.group_id, block.block_id))

    @invariant()
    def usage_is_exact(self):
        owned = sum(1 / self.capacities[block.group_id] for block in self.references())
        assert self.pool.usage == pytest.approx(owned / (self.num_pages - 1))

    @invariant()
    def indexes_agree_with_the_blocks(self):
        pages = self.pool.pages
        idle_pages = set()
        for page in filter(None, pages._pages):
            group = page.group
            live = [b for b in page.blocks if b.ref_cnt > 0]
            idle = [b for b in page.blocks if b.ref_cnt == 0 and b.block_hash is not None]
            free = group.capacity - len(live) - len(idle)
            assert (page.live, page.idle) == (len(live), len(idle))
            assert live or idle, "an empty page must have gone back"
            assert all(b in group.idle for b in idle)
            assert (page in group.with_idle) == bool(live and idle)
            expected = (group.pinned if live else group.resting) if free else None
            assert page.bucket is expected
            if free:
                assert page in expected._by_free[free]
            if not live:
                idle_pages.add(page)
        assert set(pages._idle_pages) == idle_pages
        for group in pages.groups:
            own = [p for p in pages._pages if p is not None and p.group is group]
            assert len(group.idle) == sum(p.idle for p in own)
            assert group.live == sum(p.live for p in own)
            assert group.supply == sum(group.capacity - p.live for p in own if p.live)
        lent = sum(1 for page in pages._pages if page is not None)
        assert pages.num_free_pages == self.num_pages - 1 - lent
        assert {b.block_hash: b for b in self.pool._cached.values()} == self.pool._cached

    def teardown(self):
        if self.pool is None:
            return
        for blocks in self.owners.values():
            self.pool.free_blocks(blocks)
        assert self.pool.reset_prefix_cache()
        assert self.pool.pages.num_free_pages == self.num_pages - 1


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
