# SPDX-License-Identifier: Apache-2.0
"""The agent trace, the simulated cache, and that the engine's own manager finds the same."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.agent_trace import TraceConfig, TraceRequest, make_trace, summary
from benchmarks.prefix_cache_policies import (
    Aligned,
    EveryBlock,
    Eviction,
    Exact,
    Sizes,
    policies,
)
from benchmarks.prefix_cache_simulation import (
    DATA,
    Cache,
    Entry,
    Prefixes,
    Result,
    Simulation,
)
from tests.v1.core.state_cases import full, kv_config, recurrent
from vllm.utils.hashing import sha256
from vllm.v1.core.checkpoint_policy import CheckpointPolicy
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

SMALL = TraceConfig(
    conversations=12, active=4, preamble_median=200, tool_result_median=150, message_median=40,
    answer_median=30, max_tokens=2000,
)  # fmt: skip
COARSE = Sizes(unit=64, block_bytes=64, state_bytes=64)
FINE = Sizes(unit=16, block_bytes=16, state_bytes=64)
EXACT = Exact(FINE, CheckpointPolicy(16, 16), Eviction.ENGINE)


def served(
    policy: Aligned | EveryBlock | Exact, trace: Sequence[TraceRequest], cache: Cache | None = None
) -> list[int]:
    """Tokens found by each request."""
    simulation = Simulation(policy, cache or Cache(math.inf))
    return [
        simulation.run([Prefixes(request, policy.sizes.unit)], Result(policy.name, None)).hit_tokens
        for request in trace
    ]


def request(tokens: Sequence[int], num_prompt: int, marks: tuple[int, ...] = ()) -> TraceRequest:
    return TraceRequest("test", np.array(tokens, dtype=np.int32), num_prompt, marks)


# ---- the trace ---------------------------------------------------------------------------------


def test_equal_seeds_give_equal_traces() -> None:
    first, second = make_trace(SMALL), make_trace(SMALL)
    assert len(first) == len(second)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))
    other = make_trace(TraceConfig(**{**vars(SMALL), "seed": 1}))
    assert summary(other) != summary(first)


def test_turns_continue_what_came_before() -> None:
    trace = make_trace(SMALL)
    kinds = summary(trace)["kinds"]
    expected = {"first turn", "turn", "branch", "regenerated", "completion", "one-off"}
    assert set(kinds) == expected and kinds["first turn"] == SMALL.conversations
    for i, later in enumerate(trace):
        earlier = trace[:i]
        if later.kind == "regenerated":
            same = trace[i - 1]
            assert np.array_equal(same.tokens[: same.num_prompt], later.tokens[: later.num_prompt])
        if later.kind in ("turn", "branch"):
            assert any(
                len(e.tokens) < later.num_prompt
                and np.array_equal(e.tokens, later.tokens[: len(e.tokens)])
                for e in earlier
            )
        assert all(0 < mark < later.num_prompt for mark in later.marks)


# ---- policies ----------------------------------------------------------------------------------


def test_a_next_turn_finds_all_that_was_computed() -> None:
    first = request(range(300), 200)
    follow = request(range(400), 350)
    assert served(EXACT, [first, follow]) == [0, 299]
    assert served(EveryBlock(COARSE), [first, follow]) == [0, 256]
    assert served(Aligned(COARSE), [first, follow]) == [0, 256]


def test_every_block_serves_a_divergence_and_exact_learns_it() -> None:
    shared = list(range(200))
    trace = [request([*shared, *range(1000 * i, 1000 * i + 100)], 290) for i in range(1, 4)]
    assert served(EveryBlock(COARSE), trace) == [0, 192, 192]
    assert served(Aligned(COARSE), trace) == [0, 0, 0]
    assert served(EXACT, trace) == [0, 0, 192]


def test_a_marked_preamble_serves_the_second_request() -> None:
    shared = list(range(203))
    trace = [
        request([*shared, *range(1000 * i, 1000 * i + 100)], 290, marks=(203,)) for i in range(1, 3)
    ]
    assert served(EXACT, trace) == [0, 203]


def test_a_regenerated_answer_needs_the_end_of_the_prompt() -> None:
    trace = [request([*range(200), *range(1000 * i, 1000 * i + 50)], 200) for i in range(1, 3)]
    assert served(EXACT, trace) == [0, 199]


def test_the_last_token_is_always_computed() -> None:
    first, again = request(range(300), 200), request(range(310), 299)
    assert served(EXACT, [first, again]) == [0, 199]


def test_a_state_belongs_to_its_tokens() -> None:
    """The second prompt leaves the first within the block that the turn ended in."""
    first = request(range(300), 200)
    other = request([*range(290), *range(5000, 5100)], 380)
    assert served(EXACT, [first, other]) == [0, 199]


def test_a_state_without_its_last_attention_block_is_no_hit() -> None:
    simulation = Simulation(EXACT, Cache(math.inf))
    first = Prefixes(request(range(300), 200), 16)
    simulation.run([first], Result("", None))
    del simulation.cache.entries[first.end(299)]
    follow = Prefixes(request(range(400), 350), 16)
    assert simulation.run([follow], Result("", None)).hit_tokens == 199


def test_positions_of_the_aligned_modes() -> None:
    long = request(range(20_000), 19_000)
    aligned = Aligned(Sizes(528, 1, 1))
    step = 8192 // 528 * 528
    assert aligned.prompt_positions(long, 0, 0) == [step, 2 * step, 19_000 // 528 * 528]
    assert aligned.answer_positions(long) == [19_008, 19_536]
    every = EveryBlock(Sizes(576, 1, 1))
    assert every.prompt_positions(long, 1200, 0)[:2] == [1728, 2304]


def test_prompt_ends_go_first_when_asked() -> None:
    one = request(range(100), 80)
    alike = Exact(FINE, EXACT.policy, Eviction.PROMPT_ENDS_ALIKE)
    assert EXACT.credit(one, 79, 0) == 0 < EXACT.credit(one, 99, 0) == alike.credit(one, 99, 0)
    assert alike.credit(one, 79, 0) > 0
    assert Exact(FINE, EXACT.policy, Eviction.LRU).credit(one, 79, 0) == 1


def test_sizes_of_the_benchmark_model() -> None:
    aligned, every, *exact = policies()
    assert (aligned.sizes.unit, every.sizes.unit) == (528, 576)
    assert aligned.sizes.state_bytes == 3 * aligned.sizes.block_bytes
    assert {policy.sizes for policy in exact} == {Sizes(16, 525_824, 51_530_752)}


# ---- the cache ---------------------------------------------------------------------------------


def test_without_credit_the_least_recently_used_goes() -> None:
    cache = Cache(3)
    for key in (1, 2, 3):
        cache.put(Entry(key, 1))
    cache.use(1)
    cache.put(Entry(4, 1))
    cache.shrink()
    assert set(cache.entries) == {1, 3, 4} and cache.used == 3


def test_credit_outlasts_recency_but_not_for_ever() -> None:
    cache = Cache(2)
    cache.put(Entry(0, 1, credit=3.0))
    for key in range(1, 10):
        cache.put(Entry(key, 1))
        cache.shrink()
        assert (0 in cache.entries) == (key < 6)


def test_states_have_a_limit_of_their_own() -> None:
    cache = Cache(math.inf, state_capacity=2)
    for key in range(5):
        cache.put(Entry(key, 1, place=(7, key)))
        cache.put(Entry(100 + key, 1))
        cache.shrink()
    assert cache.state_used == 2 and cache.remainders[7] == {3, 4}
    assert sum(key >= 100 for key in cache.entries) == 5


@pytest.mark.parametrize("eviction", list(Eviction))
def test_memory_is_never_exceeded(eviction: Eviction) -> None:
    cache = Cache(3000, 900)
    policy = Exact(FINE, EXACT.policy, eviction)
    for one in make_trace(SMALL)[:60]:
        served(policy, [one], cache)
        kept = cache.entries.values()
        assert cache.used == sum(entry.num_bytes for entry in kept) <= 3000
        assert cache.state_used == sum(e.num_bytes for e in kept if e.place is not None) <= 900


# ---- the engine --------------------------------------------------------------------------------


def engine_finds(manager: KVCacheManager, name: str, one: TraceRequest) -> int:
    """Run a request through the engine's cache as a scheduler does; tokens it found."""
    tokens = one.tokens.tolist()
    req = Request(
        name,
        tokens[: one.num_prompt],
        None,
        block_hasher=get_request_block_hasher(16, sha256),
    )
    blocks, hit = manager.get_computed_blocks(req)
    manager.plan_checkpoints(req, hit)
    req.num_cached_tokens = hit
    known, found = one.num_prompt, hit
    while req.num_computed_tokens < one.num_computed:
        manager.begin_step()
        start = req.num_computed_tokens + hit
        end = min(manager.chunk_end(name, start) or known, known)
        assert manager.allocate_slots(req, end - start, hit, blocks) is not None
        manager.take_copies()
        req.num_computed_tokens, hit, blocks = end, 0, None
        if end == known:
            req.append_output_token_ids(tokens[known])
            known += 1
    manager.begin_step()
    manager.free(req)
    return found


def test_the_engine_finds_what_the_simulation_does() -> None:
    """Without memory pressure; the preamble's marks are left out on both sides."""
    trace = [request(one.tokens.tolist(), one.num_prompt) for one in make_trace(SMALL)[:60]]
    manager = KVCacheManager(
        kv_config([recurrent(), full()], 20_000),
        8192,
        max_num_batched_tokens=8192,
        enable_caching=True,
    )
    found = [engine_finds(manager, str(i), one) for i, one in enumerate(trace)]
    assert found == served(EXACT, trace)
    assert sum(found) > 0.5 * sum(one.num_prompt for one in trace)


# ---- the committed measurement -----------------------------------------------------------------


def test_the_measurement_keeps_its_promise() -> None:
    """Exact checkpoints at a tenth of the bytes find as much as the better of the others."""
    results = json.loads(DATA.read_text(encoding="utf-8"))["results"]
    others = [
        r for r in results if not r["policy"].startswith("exact") and r["memory_bytes"] is None
    ]
    best = max(others, key=lambda r: r["hit_rate"])
    (ours,) = (r for r in results if r["policy"] == "exact" and r["checkpoint_limit_bytes"])
    assert ours["hit_rate"] >= best["hit_rate"]
    assert ours["peak_checkpoint_bytes"] <= best["peak_checkpoint_bytes"] / 10
