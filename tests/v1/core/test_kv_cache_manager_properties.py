# SPDX-License-Identifier: Apache-2.0
"""Random traffic over random groups, with a simulated arena that remembers what was written.

Every step checks that what a request would read is what it (or an equal prefix) wrote, wherever
its blocks came from: fresh, shared, evicted from another group, resumed after preemption.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from state_cases import full, hidden, kv_config, recurrent, request, window

from vllm.cache_options import CacheOptions
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

MAX_LEN = 160
STEP = 48
KINDS = [
    *(full(), full(block_size=48), hidden(), hidden(block_size=32)),
    *(window(20), window(70), window(20, block_size=32), recurrent(block_size=4096)),
]


class Memory:
    """Contents of the arena; writing a block of one group destroys overlapping ones of others."""

    def __init__(self, config):
        self.capacities = [group.blocks_per_page for group in config.plan.groups]
        self.pages: dict[int, tuple[int, dict]] = {}

    def _page(self, group, block_id):
        return block_id // self.capacities[group]

    def write(self, group, block_id, offset, value):
        page = self._page(group, block_id)
        assert page > 0, "the null page was written"
        if self.pages.get(page, (None,))[0] != group:
            self.pages[page] = (group, {})
        self.pages[page][1][block_id, offset] = value

    def copy(self, group, source, target):
        owner, content = self.pages.get(self._page(group, source), (None, {}))
        assert owner == group, "the source's page was taken by another group"
        values = {offset: v for (block_id, offset), v in content.items() if block_id == source}
        for offset, value in values.items():
            self.write(group, target, offset, value)

    def read(self, group, block_id, offset):
        owner, content = self.pages.get(self._page(group, block_id), (None, {}))
        assert owner == group, "the page was taken by another group"
        return content[block_id, offset]


class Engine:
    """A scheduler reduced to what touches state memory."""

    def __init__(self, specs, num_pages, capacities, interval=None):
        self.config = kv_config(specs, num_pages, capacities)
        self.specs = specs
        self.memory = Memory(self.config)
        self.manager = KVCacheManager(
            self.config,
            MAX_LEN,
            max_num_batched_tokens=200,
            enable_caching=True,
            checkpoint_interval=interval,
        )
        self.running = []
        self.waiting = []

    def step(self, budget):
        """Continue running requests, preempting the youngest, then admit; then compute."""
        self.manager.begin_step()
        work = []
        for req in list(self.running):
            todo = self.chunk(req, req.num_computed_tokens, budget)
            if req not in self.running or todo <= 0:
                continue
            while self.manager.allocate_slots(req, todo) is None:
                victim = self.running.pop()
                self.preempt(victim)
                work = [item for item in work if item[0] is not victim]
                if victim is req:
                    break
            else:
                work.append((req, todo))
                budget -= todo
        while self.waiting and budget > 0:
            req = self.waiting[0]
            blocks, hit = self.manager.get_computed_blocks(req)
            if self.manager.is_coming(req, hit):
                break
            self.manager.plan_checkpoints(req, hit)
            todo = self.chunk(req, hit, budget)
            if self.manager.allocate_slots(req, todo, hit, blocks) is None:
                # What a hit shares and what it copies from may be too much together.
                if self.running or not hit:
                    break
                hit = 0
                self.manager.plan_checkpoints(req, hit)
                todo = self.chunk(req, hit, budget)
                if self.manager.allocate_slots(req, todo) is None:
                    break
            self.waiting.pop(0)
            self.running.append(req)
            req.num_computed_tokens = hit
            work.append((req, todo))
            budget -= todo
        before, after = self.manager.take_copies()
        self.copy(before)
        for req, todo in work:
            self.write(req, todo)
        self.copy(after)
        for req, todo in work:
            req.num_computed_tokens += todo
            self.check(req)
            if req.num_computed_tokens == req.num_tokens and req.num_tokens < MAX_LEN:
                req.append_output_token_ids(req.num_tokens % 3)

    def chunk(self, req, computed, budget):
        end = self.manager.chunk_end(req.request_id, computed) or req.num_tokens
        return min(min(end, req.num_tokens) - computed, budget)

    def copy(self, copies):
        for copy in copies:
            self.memory.copy(copy.group_id, copy.source, copy.target)

    def preempt(self, req):
        self.manager.free(req)
        req.num_computed_tokens = 0
        self.waiting.insert(0, req)

    def finish(self, req):
        self.running.remove(req)
        self.manager.free(req)

    def write(self, req, num_tokens):
        start = req.num_computed_tokens
        for group, ids in enumerate(self.manager.get_block_ids(req.request_id)):
            if isinstance(self.specs[group], MambaSpec):
                if start:
                    assert self.memory.read(group, ids[0], 0) == req.all_token_ids[:start]
                self.memory.write(group, ids[0], 0, req.all_token_ids[: start + num_tokens])
                continue
            for position in range(start, start + num_tokens):
                index, offset = divmod(position, self.specs[group].block_size)
                value = tuple(req.all_token_ids[: position + 1])
                self.memory.write(group, ids[index], offset, value)

    def check(self, req):
        """Every position the next token reads holds this request's own prefix."""
        end = req.num_computed_tokens
        for group, ids in enumerate(self.manager.get_block_ids(req.request_id)):
            spec = self.specs[group]
            if isinstance(spec, MambaSpec):
                continue
            first = max(0, end - spec.sliding_window + 1) if is_window(spec) else 0
            for position in range(first, end):
                index, offset = divmod(position, spec.block_size)
                value = self.memory.read(group, ids[index], offset)
                assert value == tuple(req.all_token_ids[: position + 1])


def is_window(spec):
    return isinstance(spec, SlidingWindowSpec)


PROMPTS = [[p % 2] * 40 + [p] * n for p in range(3) for n in (1, 20, 60)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=4, unique=True),
    st.integers(1, 6),
    st.sampled_from([0, 0, 1, 2, 4, 8, 30]),
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, len(PROMPTS) - 1)), min_size=1, max_size=40
    ),
    st.sampled_from([None, 5, 16, 33]),
    st.lists(st.integers(1, 100), max_size=3),
)
def test_requests_read_what_was_written(kinds, capacity, spare_pages, events, interval, marks):
    specs = [KINDS[kind] for kind in kinds]
    capacities = [1 + (capacity * (i + 1)) % 5 for i in range(len(specs))]
    needed = sum(
        -(-spec.blocks_for(MAX_LEN) // r) for spec, r in zip(specs, capacities, strict=True)
    )
    engine = Engine(specs, 1 + needed + spare_pages, capacities, interval)
    for number, (action, choice) in enumerate(events):
        if action < 4:
            for i in range(1 + action % 3):
                prompt = PROMPTS[(choice + i) % len(PROMPTS)]
                engine.waiting.append(
                    request(f"r{number}.{i}", prompt, cache=CacheOptions(tuple(marks)))
                )
        elif action == 4 and engine.running:
            engine.finish(engine.running[choice % len(engine.running)])
        elif action == 5 and engine.running:
            engine.preempt(engine.running.pop(choice % len(engine.running)))
        engine.step((STEP, 7, 200)[action % 3])
        for req in engine.waiting:
            assert req.request_id not in engine.manager.managers[0].req_to_blocks
        assert engine.running or not engine.waiting, "one request must always fit"
    for req in list(engine.running):
        engine.finish(req)
    engine.manager.begin_step()
    assert engine.manager.usage == 0.0
    assert engine.manager.reset_prefix_cache()
    assert engine.manager.block_pool.num_cached_blocks == 0
    pages = engine.manager.block_pool.pages
    assert pages.num_free_pages == engine.config.plan.num_pages - 1
    for manager in engine.manager.managers:
        assert not manager.req_to_blocks


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(1, STEP), min_size=1, max_size=20),
)
def test_a_request_never_holds_more_than_was_reckoned_with(spec, steps):
    manager = KVCacheManager(
        kv_config([spec], 40, [1]), MAX_LEN, max_num_batched_tokens=STEP, enable_caching=True
    )
    req = request("a", range(MAX_LEN))
    limit = spec.max_blocks_per_request(STEP, MAX_LEN)
    for todo in steps:
        todo = min(todo, MAX_LEN - req.num_computed_tokens)
        if todo:
            assert manager.allocate_slots(req, todo) is not None
            req.num_computed_tokens += todo
        assert manager.block_pool.pages.num_live_blocks <= limit
