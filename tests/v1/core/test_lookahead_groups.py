# SPDX-License-Identifier: Apache-2.0
"""Groups whose rows depend on the token after them: a draft head's keys and values.

A hit may end where such a row is the last only if that token is the same as well; else it ends a
block earlier, and the receipt says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from state_cases import (
    done,
    full,
    generate,
    kv_config,
    manager_of,
    recurrent,
    request,
    run,
    step,
    window,
)

from vllm.cache_options import CacheOptions
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.state_groups import get_kv_cache_groups

HEAD = full(lookahead=1)
ATTENTION = [full(), HEAD]
HYBRID = [full(), HEAD, recurrent(block_size=4096)]


def hit(manager: KVCacheManager, tokens: Any, **fields: Any) -> int:
    manager.begin_step()
    return manager.get_computed_blocks(request("probe", tokens, **fields))[1]


def run_prompt(manager: KVCacheManager, name: str, tokens: Any, **fields: Any) -> Any:
    req = request(name, tokens, **fields)
    while req.num_computed_tokens < req.num_tokens:
        step(manager, req)
    return req


def test_a_head_has_a_group_of_its_own() -> None:
    from state_cases import vllm_config

    groups = get_kv_cache_groups(vllm_config(), {"a": full(), "b": HEAD, "c": full()})
    assert [group.layer_names for group in groups] == [["a", "c"], ["b"]]
    assert [group.kv_cache_spec.label for group in groups] == ["attention", "drafter's attention"]
    assert HEAD.page_size_bytes == full().page_size_bytes
    assert window(32, lookahead=1).keeping_every_token().num_lookahead_tokens == 1


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (range(65), 64),  # token 64 is the same
        ([*range(64), 999], 48),  # another one follows row 63
        ([*range(63), 999, 999], 48),
        ([*range(49), 999], 48),
        ([*range(48), 999], 32),
        (range(64), 48),
        (range(17), 16),
        ([*range(16), 999], 0),
    ],
)
def test_the_next_token_is_part_of_a_block(tokens: Any, expected: int) -> None:
    manager = manager_of(ATTENTION, 50)
    done(manager, "a", range(100))
    assert hit(manager, tokens) == expected


def test_windows_look_ahead_as_well() -> None:
    manager = manager_of([full(), replace(window(20), lookahead=1)], 50)
    done(manager, "a", range(100))
    assert hit(manager, range(65)) == 64
    assert hit(manager, [*range(64), 999]) == 48


def test_two_requests_keep_their_own_last_rows() -> None:
    """Both share tokens 0 to 63; each finds the block whose last row saw its own next token."""
    manager = manager_of(ATTENTION, 50)
    done(manager, "a", range(80))
    done(manager, "b", [*range(64), *range(500, 516)])
    first, second = (
        manager.get_computed_blocks(request(name, tokens))[0].blocks
        for name, tokens in (("c", range(66)), ("d", [*range(64), 500, 501]))
    )
    assert first[0] == second[0]
    assert first[1][:3] == second[1][:3]
    assert first[1][3] is not second[1][3]


def test_a_block_waits_for_the_token_after_it() -> None:
    manager = manager_of(ATTENTION, 50)
    req = request("a", range(32))
    assert run(manager, req)
    head = manager.managers[1]
    found = [manager.block_pool.get_cached_block(h, 0) for h in req.block_hashes]
    assert None not in found
    assert len(head.keys(req).block_hashes) == 1
    req.append_output_token_ids(7)
    assert run(manager, req)
    hashes = head.keys(req).block_hashes
    assert [manager.block_pool.get_cached_block(h, 1) is not None for h in hashes] == [True] * 2
    assert hashes[:1] == [hashes[0]]
    with pytest.raises(IndexError):
        hashes[2]


def test_the_receipt_names_the_head() -> None:
    manager = manager_of(ATTENTION, 50)
    done(manager, "a", range(100))
    req = request("b", [*range(64), 999, 999])
    assert run(manager, req)
    report = manager.take_report(req)
    assert report is not None
    assert (report.cached_tokens, report.lost_tokens) == (48, 16)
    assert (report.limited_by, report.reason) == (1, "next_token")


def test_the_receipt_of_an_evicted_row() -> None:
    manager = manager_of(ATTENTION, 50)
    done(manager, "a", range(100))
    known = request("x", range(100))
    keys = manager.managers[1].keys(known).block_hashes
    block = manager.block_pool.get_cached_block(keys[3], 1)
    assert block is not None
    manager.block_pool.uncache_block(block)
    req = request("b", range(66))
    assert run(manager, req)
    report = manager.take_report(req)
    assert report is not None and (report.limited_by, report.reason) == (1, "evicted")


# ---- beside recurrent state ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 17, 33, 100])
def test_a_repeated_prompt_computes_its_last_token_only(length: int) -> None:
    manager = manager_of(HYBRID, 100)
    manager.free(run_prompt(manager, "a", range(length)))
    assert hit(manager, range(length)) == length - 1


@pytest.mark.parametrize(("prompt", "answer"), [(12, 5), (40, 24), (33, 100), (31, 2)])
def test_the_next_turn_continues_from_everything_computed(prompt: int, answer: int) -> None:
    manager = manager_of(HYBRID, 100)
    req = request("a", range(prompt))
    generate(manager, req, answer)
    turn, computed = list(req.all_token_ids), req.num_computed_tokens
    manager.free(req)
    assert hit(manager, [*turn, 900, 901]) == computed == prompt + answer - 1


def test_a_mark_serves_whoever_shares_the_marked_prefix() -> None:
    """One token before it: what follows a mark is another token each time."""
    manager = manager_of(HYBRID, 100)
    tokens = [*range(70), 900, 901]
    manager.free(run_prompt(manager, "a", tokens, cache=CacheOptions(checkpoints=(70,))))
    assert hit(manager, [*range(70), 800, 801]) == 69


def test_events_tell_of_the_target_only() -> None:
    manager = manager_of(ATTENTION, 50, enable_kv_cache_events=True)
    done(manager, "a", range(40))
    assert {event.group_idx for event in manager.take_events()} == {0}
    for block in {b for b in manager.block_pool._cached.values()}:
        manager.block_pool.uncache_block(block)
    assert {event.group_idx for event in manager.take_events()} == {0}


def test_arena_plans_the_group() -> None:
    config = kv_config([full(), HEAD], 10)
    assert len(config.plan.groups) == 2
