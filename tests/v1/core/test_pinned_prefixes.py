# SPDX-License-Identifier: Apache-2.0
"""Pins: what they hold, when they end, and that they never cost a request its memory."""

from __future__ import annotations

from state_cases import full, manager_of, recurrent, request, step

from vllm.cache_options import CacheOptions
from vllm.v1.core.pinned_prefixes import PinnedPrefixes
from vllm.v1.request import RequestStatus

PINNED = CacheOptions(pin_seconds=60.0)


def finished(manager, name, tokens, **fields):
    req = request(name, tokens, **fields)
    while req.num_computed_tokens < req.num_tokens:
        step(manager, req)
    req.status = RequestStatus.FINISHED_LENGTH_CAPPED
    manager.free(req)
    manager.begin_step()


def hit(manager, tokens):
    return manager.get_computed_blocks(request("probe", tokens))[1]


def live(manager):
    return manager.block_pool.pages.num_live_blocks


def test_a_pinned_turn_survives_what_would_evict_it():
    for cache, kept in ((PINNED, 100), (CacheOptions(), 0)):
        manager = manager_of([full(), recurrent()], 40)
        finished(manager, "a", range(100), cache=cache)
        for i in range(1, 30):
            finished(manager, f"b{i}", range(1000 * i, 1000 * i + 100))
        assert hit(manager, range(101)) == kept


def test_a_preempted_request_pins_nothing():
    manager = manager_of([full(), recurrent()], 40)
    req = request("a", range(100), cache=PINNED)
    step(manager, req)
    manager.free(req)
    manager.begin_step()
    assert not manager.pins.release_next()
    assert live(manager) == 0


def test_pins_end_in_the_order_of_their_time():
    manager = manager_of([full()], 40)
    now = 0.0
    pins = PinnedPrefixes(manager.block_pool, clock=lambda: now)
    blocks = manager.block_pool.get_new_blocks([3], [None])[0]
    assert pins.pin(blocks, 20.0) and pins.pin(blocks[:1], 10.0)
    manager.block_pool.free_blocks(blocks)
    assert [block.ref_cnt for block in blocks] == [2, 1, 1]
    now = 10.0
    pins.expire()
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    now = 20.0
    pins.expire()
    assert live(manager) == 0 and not pins.release_next()


def test_half_of_the_arena_at_most():
    manager = manager_of([full()], 21)
    blocks = manager.block_pool.get_new_blocks([16], [None])[0]
    first, second = blocks[:8], blocks[8:]
    pins = manager.pins
    assert pins.pin(first, 60.0)
    assert not pins.pin(second, 60.0)
    assert pins.release_next() and pins.pin(second, 60.0)
    manager.block_pool.free_blocks(blocks)
    assert live(manager) == 8


def test_a_reset_that_is_refused_keeps_the_pins():
    manager = manager_of([full(), recurrent()], 40)
    finished(manager, "a", range(100), cache=PINNED)
    running = request("b", range(500, 520))
    step(manager, running)
    pinned = live(manager)
    assert not manager.reset_prefix_cache()
    assert live(manager) == pinned and hit(manager, range(101)) == 100
    manager.free(running)
    assert manager.reset_prefix_cache()
    assert live(manager) == 0 and hit(manager, range(101)) == 0


def test_a_block_that_several_pins_hold_counts_once():
    """40 conversations that begin alike pin what they share and what each of them adds."""
    manager = manager_of([full(), recurrent()], 500)
    prefix = list(range(160))
    for i in range(40):
        finished(manager, f"r{i}", [*prefix, 1000 + i, 7, 8], cache=PINNED)
    held = manager.block_pool.pages.live_pages
    assert manager.pins.pages == held < 0.5 * 499
    for i in range(40):
        assert hit(manager, [*prefix, 1000 + i, 7, 8, 9]) == 163
    for left in range(39, -1, -1):
        assert manager.pins.release_next()
        assert manager.pins.pages == manager.block_pool.pages.live_pages, left
    assert manager.pins.pages == 0 and not manager.pins.release_next()


def test_blocks_given_twice_are_held_once():
    manager = manager_of([full()], 40)
    blocks = manager.block_pool.get_new_blocks([3], [None])[0]
    assert manager.pins.pin([*blocks, *blocks], 20.0)
    assert [block.ref_cnt for block in blocks] == [2, 2, 2]
    assert manager.pins.release_next()
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
