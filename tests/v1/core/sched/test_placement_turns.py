# SPDX-License-Identifier: Apache-2.0
"""Placements of a supernet in the scheduler: a step runs one, and nobody waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.v1.core.sched.helpers import Driver, make_request
from tests.v1.engine.fakes import EOS, expected_tokens, make_vllm_config
from vllm.cache_options import CacheOptions
from vllm.sampling_params import SamplingParams
from vllm.v1.core.placed_arena import (
    estimate_placed_max_model_len,
    get_placed_configs,
    with_placement,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.request import Request

FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32
)
#: every block is a page, whose number the fake worker sees
PLACED = [
    ("all-full", {"a": FULL, "b": FULL}),
    ("other-full", {"a": FULL, "c": FULL}),
    ("half", {"a": FULL, "b": FULL, "d": WINDOW, "e": WINDOW}),
]


def make(num_blocks: int, async_scheduling: bool = False, **options: Any) -> Scheduler:
    config = make_vllm_config(
        async_scheduling=async_scheduling, num_blocks=num_blocks, max_model_len=256, **options
    )
    memory = get_placed_configs(config, [PLACED], [1 << 30])[0]
    return (AsyncScheduler if async_scheduling else Scheduler)(config, memory)


def request_of(name: str, placement: int, length: int, max_tokens: int) -> Request:
    rng = random.Random(name)
    made = make_request(name, rng.choices(range(20, 1000), k=length), max_tokens=max_tokens)
    made.placement = placement
    return made


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_runs_one_placement_and_all_requests_end(async_scheduling: bool) -> None:
    """Requests with common prompts, in little memory; what each placement takes is its own."""
    driver = Driver(make(34, async_scheduling, max_num_batched_tokens=64))
    rng, made = random.Random(0), {}
    for i in range(18):
        prompt = random.Random(i % 2).choices(range(20, 1000), k=rng.randint(1, 90))
        one = make_request(f"r{i}", prompt, max_tokens=rng.randint(20, 60))
        one.placement = rng.randrange(3)
        made[one.request_id] = one
        driver.add(one)
        for _ in range(rng.randint(0, 3)):
            driver.step()
    driver.run()
    for name, one in made.items():
        params = SamplingParams(max_tokens=one.max_tokens)
        assert driver.tokens[name] == expected_tokens(one.prompt_token_ids, params, eos=EOS)
    ran = set()
    for step in driver.worker.steps:
        used = {made[name].placement for name in step.num_scheduled_tokens}
        assert used <= {step.placement}
        ran |= used
        for new in step.scheduled_new_reqs:
            own = driver.scheduler.kv_cache_config.of_placement(step.placement)
            assert len(new.block_ids) == len(own.kv_cache_groups)
    assert ran == {0, 1, 2}
    assert any(step.preempted_req_ids for step in driver.worker.steps)
    assert driver.scheduler.kv_cache_manager.usage == 0
    assert driver.scheduler.reset_prefix_cache()


def test_placements_take_turns() -> None:
    driver = Driver(make(64))
    driver.add(*(request_of(f"r{i}", (0, 0, 0, 1)[i], 4, 6) for i in range(4)))
    assert [driver.step().placement for _ in range(6)] == [0, 1, 0, 1, 0, 1]
    driver.add(request_of("late", 2, 4, 6))
    assert [driver.step().placement for _ in range(4)] == [2, 0, 1, 2]
    driver.run()


def test_who_waits_for_room_is_not_overtaken() -> None:
    """One long request of a placement waits while short ones of another come without end."""
    driver = Driver(make(34, caching=False))
    for i in range(60):
        driver.add(*(request_of(f"{i}-{j}", 0, 60, 8) for j in range(2)))
        if i == 4:
            driver.add(request_of("long", 1, 230, 2))
        driver.step()
        if "long" in driver.finished:
            break
    assert "long" in driver.finished


def test_a_free_row_goes_to_the_first_that_waits() -> None:
    driver = Driver(make(64, max_num_seqs=2))
    driver.add(request_of("stays", 0, 4, 30), request_of("ends", 1, 4, 3))
    driver.step()
    driver.step()
    driver.add(request_of("first", 1, 4, 2), *(request_of(f"m{i}", 0, 4, 9) for i in range(3)))
    order: list[str] = []
    while driver.scheduler.has_requests():
        order += [new.req_id for new in driver.step().scheduled_new_reqs]
    assert order.index("first") == 0


def test_what_one_placement_cached_no_other_finds() -> None:
    driver = Driver(make(64))
    shared = request_of("a", 1, 64, 2)
    driver.add(shared)
    driver.run()
    for name, placement, found in (("same", 1, 48), ("other", 0, 0), ("third", 2, 0)):
        one = make_request(name, shared.prompt_token_ids, max_tokens=1)
        one.placement = placement
        driver.add(one)
        driver.run()
        assert driver.finished[name].num_cached_tokens == found


def test_a_placement_takes_the_place_of_another() -> None:
    """Not of one that runs; what it cached is gone, and those that had it and wait, wait again."""
    scheduler = make(64, max_num_seqs=1)
    driver = Driver(scheduler)
    driver.add(request_of("runs", 2, 40, 4), request_of("waits", 1, 40, 4))
    driver.step()
    assert not scheduler.retire_placement(2)
    assert scheduler.retire_placement(1)
    (waits,) = scheduler.waiting_requests()
    assert waits.awaits_placement
    driver.add(request_of("behind", 2, 4, 1))
    for _ in range(10):
        driver.step()
    assert set(driver.finished) == {"runs"}, "nobody overtakes who waits for a place"
    cached = scheduler.kv_cache_manager.block_pool.num_cached_blocks
    config = with_placement(
        scheduler.vllm_config,
        scheduler.kv_cache_config,
        1,
        ("third-full", {"b": FULL, "c": FULL}),
        scheduler.kv_cache_config.placements[1].first,
    )
    scheduler.set_placement(1, config)
    assert [placed.placement for placed in config.placements][1] == "third-full"
    waits.placement, waits.awaits_placement = 1, False
    driver.run()
    assert set(driver.finished) == {"runs", "waits", "behind"}
    assert cached and scheduler.retire_placement(2)
    assert scheduler.reset_prefix_cache() and not scheduler.kv_cache_manager.usage


def test_only_what_is_retired_is_unpinned() -> None:
    driver = Driver(make(64))
    for placement in (0, 1, 2):
        one = request_of(f"r{placement}", placement, 40, 2)
        one.cache = CacheOptions(pin_seconds=60.0 + placement)
        driver.add(one)
        driver.run()
    scheduler = driver.scheduler
    pins, held = scheduler.kv_cache_manager.pins, scheduler.kv_cache_manager.usage
    pages = pins.pages
    assert scheduler.retire_placement(1)
    assert 0 < scheduler.kv_cache_manager.usage < held and 0 < pins.pages < pages
    for kept in (0, 2):
        first = scheduler.kv_cache_config.placements[kept].first
        assert not scheduler.kv_cache_manager.block_pool.forget_groups(first, 1), "still pinned"
    assert pins.release_next() and pins.release_next() and not pins.release_next()
    assert scheduler.reset_prefix_cache() and not scheduler.kv_cache_manager.usage


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_who_lost_its_blocks_gives_its_place_up_first(max_num_seqs: int) -> None:
    """By priority it waits behind a request that waits for its place, and goes on all the same; who
    has not started does not."""
    scheduler = make(64, policy="priority", max_num_seqs=max_num_seqs)
    driver = Driver(scheduler)
    started = request_of("started", 1, 40, 6)
    started.priority = 5
    driver.add(started)
    driver.step()
    urgent, behind = request_of("urgent", 0, 4, 2), request_of("behind", 1, 4, 2)
    urgent.awaits_placement, behind.priority = True, 6
    driver.add(urgent, behind)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.waiting_requests() == [urgent, started, behind]
    for _ in range(20):
        driver.step()
    assert set(driver.finished) == {"started"}
    assert scheduler.retire_placement(1) and behind.awaits_placement
    for one, placement in ((urgent, 0), (behind, 1)):
        one.placement, one.awaits_placement = placement, False
    driver.run()
    assert set(driver.finished) == {"started", "urgent", "behind"}


def test_what_does_not_fit_names_the_placement() -> None:
    config = make_vllm_config(num_blocks=10, max_model_len=256)
    fits = estimate_placed_max_model_len(config, PLACED, 1 << 30)
    assert fits == 4 * 16
    with pytest.raises(ValueError, match="all-full: One request of max_model_len 256 needs"):
        get_placed_configs(config, [PLACED], [1 << 30])
    config.model_config.max_model_len = fits
    memory = get_placed_configs(config, [PLACED], [1 << 30])[0]
    large = {f"{i}": replace(FULL, num_kv_heads=8) for i in range(9)}
    with pytest.raises(ValueError, match="9 layers of FullAttentionSpec keep .* more than a page"):
        with_placement(config, memory, 3, ("large", large), len(memory.kv_cache_groups))
