# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of recurrent state: where they are left, found, copied, waited for and forgotten."""

from __future__ import annotations

import pytest
from state_cases import full, generate, hidden, manager_of, recurrent, request, step, window

from vllm.cache_options import CacheOptions
from vllm.v1.core.checkpoint_policy import CheckpointPolicy
from vllm.v1.core.idle_queue import IdleQueue

HYBRID = [full(), recurrent(block_size=4096)]


def hybrid(num_pages=100, **options):
    return manager_of(HYBRID, num_pages, **options)


def marks(positions):
    return CacheOptions(checkpoints=tuple(positions))


def hit(manager, tokens, **fields):
    manager.begin_step()
    return manager.get_computed_blocks(request("probe", tokens, **fields))[1]


def run_prompt(manager, name, tokens, **fields):
    req = request(name, tokens, **fields)
    while req.num_computed_tokens < req.num_tokens:
        step(manager, req)
    return req


# ---- where ---------------------------------------------------------------------------------------


def test_a_repeated_prompt_computes_its_last_token_only():
    for length in (2, 12, 16, 17, 33, 100):
        manager = hybrid()
        manager.free(run_prompt(manager, "a", range(length)))
        assert hit(manager, range(length)) == length - 1


def test_a_prompt_of_one_token_leaves_nothing_to_hit():
    manager = hybrid()
    manager.free(run_prompt(manager, "a", [5]))
    assert hit(manager, [5]) == 0
    assert hit(manager, [5, 6]) == 1  # the end of its turn


@pytest.mark.parametrize("prompt, answer", [(12, 1), (12, 5), (40, 24), (33, 100)])
def test_the_next_turn_continues_from_everything_computed(prompt, answer):
    manager = hybrid()
    req = request("a", range(prompt))
    generate(manager, req, answer)
    computed = req.num_computed_tokens
    assert computed == prompt + answer - 1
    turn = list(req.all_token_ids)
    manager.free(req)
    assert hit(manager, [*turn, 7, 8, 9]) == computed


@pytest.mark.parametrize("specs", [[full()], [window(20)], [full(), window(20)], [hidden()]])
def test_every_kind_of_paged_state_continues_inside_a_block(specs):
    manager = manager_of([*specs, recurrent()], 100)
    manager.free(run_prompt(manager, "a", range(43)))
    req = request("b", range(43))
    manager.begin_step()
    blocks, num_tokens = manager.get_computed_blocks(req)
    assert num_tokens == 42
    copies = step(manager, req)
    own = manager.get_block_ids("b")
    assert [(c.group_id, c.target) for c in copies[: len(specs) + 1]] == [
        *((g, own[g][2]) for g in range(len(specs))),
        (len(specs), own[-1][0]),
    ]
    sources = [source.block_id for source in blocks.sources]
    assert [c.source for c in copies[: len(specs) + 1]] == sources


def test_a_partial_block_that_a_load_takes_out_of_its_window_is_not_copied():
    manager = manager_of([full(), window(20), recurrent()], 100)
    manager.free(run_prompt(manager, "a", range(43)))
    req = request("b", range(120))
    manager.begin_step()
    blocks, num_found = manager.get_computed_blocks(req)
    assert num_found == 43 and all(blocks.sources)
    load = {"num_external_computed_tokens": 100 - num_found, "delay_cache_blocks": True}
    assert manager.allocate_slots(req, 0, num_found, blocks, **load)
    full_ids, window_ids, [state] = manager.get_block_ids("b")
    assert window_ids[:5] == [0] * 5 and all(window_ids[5:])
    copies, _ = manager.take_copies()
    assert [(c.group_id, c.target) for c in copies] == [(0, full_ids[2]), (2, state)]
    manager.free(req)
    assert manager.usage == 0


@pytest.mark.parametrize("specs", [[full()], [window(20)], [hidden()]])
def test_no_copy_is_made_of_a_block_that_the_same_step_fills(specs):
    """Copies come before the step; what an earlier request left inside the block is copied."""
    manager = manager_of([*specs, recurrent()], 100)
    early = request("early", range(60))
    step(manager, early, budget=16)  # before anything of the prompt is in the cache
    left = run_prompt(manager, "left", range(43))
    kept = manager.get_block_ids("left")[0][2]
    manager.free(left)
    late = request("late", [*range(48), 7])
    copies = step(manager, early, late)
    [source] = [c.source for c in copies if c.target == manager.get_block_ids("late")[0][2]
                and c.group_id == 0]  # fmt: skip
    assert source == kept != manager.get_block_ids("early")[0][2]


def test_models_without_recurrent_state_share_whole_blocks_only():
    manager = manager_of([full(), window(20)], 100)
    manager.free(run_prompt(manager, "a", range(43)))
    assert hit(manager, range(43)) == 32
    assert manager.take_copies() == ([], [])
    assert manager.chunk_end("a", 0) is None


def test_client_marks():
    manager = hybrid()
    req = request("a", range(100), cache=marks([20, 50, 99, 100, 1000]))
    ends = []
    while req.num_computed_tokens < 100:
        step(manager, req)
        ends.append(req.num_computed_tokens)
    assert ends == [20, 50, 99, 100]
    assert hit(manager, [*range(20), 1, 2]) == 20
    assert hit(manager, [*range(60), 1, 2]) == 50
    assert hit(manager, [*range(19), 1, 2]) == 0


def test_divergence_is_learnt_on_first_sighting():
    manager = hybrid()
    for length, learnt in ((50, 48), (64, 64), (150, 128)):
        manager = hybrid()
        preamble = list(range(length))
        manager.free(run_prompt(manager, "a", [*preamble, *[1] * 30]))
        assert hit(manager, [*preamble, *[2] * 30]) == 0
        manager.free(run_prompt(manager, "b", [*preamble, *[2] * 30]))
        assert hit(manager, [*preamble, *[3] * 30]) == learnt


def test_interval():
    manager = hybrid(checkpoint_interval=32)
    manager.free(run_prompt(manager, "a", range(120)))
    for length, expected in ((31, 0), (33, 32), (70, 64), (110, 96), (130, 120)):
        assert hit(manager, [*range(min(length, 120)), 5, 6]) == expected


def test_budget_cuts_do_not_lose_checkpoints():
    manager = hybrid()
    req = request("a", range(100), cache=marks([50]))
    while req.num_computed_tokens < 100:
        step(manager, req, budget=30)
    assert hit(manager, [*range(60), 1]) == 50


# ---- who may find them ---------------------------------------------------------------------------


def test_a_checkpoint_cannot_be_found_in_the_step_that_makes_it():
    manager = hybrid()
    a = request("a", range(20))
    step(manager, a)
    assert manager.get_computed_blocks(request("b", range(20)))[1] == 0
    manager.begin_step()
    assert manager.get_computed_blocks(request("b", range(20)))[1] == 19


def test_identical_prompts_wait_for_the_first():
    manager = hybrid()
    a, b, other = request("a", range(20)), request("b", range(20)), request("o", range(1, 30))
    assert not manager.is_coming(b, 0)
    step(manager, a)
    assert manager.is_coming(b, 0)
    assert not manager.is_coming(other, 0)
    assert not manager.is_coming(request("short", range(19)), 0)
    manager.begin_step()
    assert not manager.is_coming(b, 19)
    copies = step(manager, b)
    assert b.num_computed_tokens == 20
    assert len(copies) == 2


def test_nobody_waits_for_a_request_that_went_away():
    manager = hybrid()
    a = request("a", range(200))
    step(manager, a, budget=30)
    assert manager.is_coming(request("b", range(200)), 0)
    manager.free(a)
    assert not manager.is_coming(request("b", range(200)), 0)
    assert not manager.checkpoints.plans._coming


def test_a_request_that_never_ran_leaves_no_plan():
    """It was looked at, found no room, and its client went away."""
    manager = hybrid(num_pages=4)
    running, waiting = request("a", range(30)), request("b", range(100, 180))
    step(manager, running)
    manager.plan_checkpoints(waiting, 0)
    assert manager.allocate_slots(waiting, 80) is None
    for req in (waiting, running):
        manager.free(req)
    plans = manager.checkpoints.plans
    assert not plans._positions and not plans._coming and not plans._announced


def test_nobody_waits_for_a_position_that_a_second_plan_leaves_out():
    """A request that loaded a prefix is planned again, without what its look-up had taught."""
    manager = hybrid()
    shared = list(range(150))
    manager.free(run_prompt(manager, "a", [*shared, 1]))
    b, c = request("b", [*shared[:100], 2]), request("c", [*shared[:100], 3])
    step(manager, b, budget=10)
    assert manager.is_coming(c, 0)
    manager.discard_match(b)
    manager.plan_checkpoints(b, 10)
    while b.num_computed_tokens < b.num_tokens:
        step(manager, b)
    assert not manager.is_coming(c, 0)


def test_salts_keep_checkpoints_apart():
    manager = hybrid()
    manager.free(run_prompt(manager, "a", range(12), cache_salt="x"))
    assert hit(manager, range(12)) == 0
    assert hit(manager, range(12), cache_salt="y") == 0
    assert hit(manager, range(12), cache_salt="x") == 11


# ---- what must not be kept -----------------------------------------------------------------------


def test_a_state_ahead_of_the_known_tokens_is_not_kept():
    """With asynchronous scheduling a step may compute a token whose value is still unknown."""
    manager = hybrid()
    req = run_prompt(manager, "a", range(20))
    manager.begin_step()
    assert manager.allocate_slots(req, 1) is not None
    req.num_computed_tokens += 1
    assert req.num_computed_tokens > req.num_tokens
    manager.free(req)
    assert hit(manager, [*range(20), 1, 2]) == 19


def test_a_state_past_a_stop_string_is_not_kept():
    manager = hybrid()
    req = request("a", range(20))
    generate(manager, req, 8)
    req.truncate_output(3)
    req.num_computed_tokens = req.num_tokens
    manager.free(req)
    assert hit(manager, [*range(20), 100, 101, 102, 103, 104, 105, 106, 9]) == 19


def test_what_follows_a_failed_load_is_forgotten():
    manager = hybrid()
    req = request("a", range(100), cache=marks([20, 60]))
    while req.num_computed_tokens < 99:
        step(manager, req)
    manager.begin_step()
    manager.forget_after(req, 32)
    req.num_computed_tokens = 32
    manager.free(req)
    assert hit(manager, range(100)) == 20


def test_no_checkpoint_without_room_and_nobody_hangs():
    """Four pages: the null page, two blocks of attention and the running state."""
    manager = hybrid(num_pages=4)
    req = run_prompt(manager, "a", range(30))
    assert not manager.is_coming(request("b", range(30)), 0)
    manager.free(req)
    assert manager.reset_prefix_cache()
    assert manager.block_pool.pages.num_free_pages == 3


def test_reset_between_steps_drops_what_the_last_one_saved():
    manager = hybrid()
    req = request("a", range(20))
    step(manager, req)
    manager.free(req)
    assert manager.reset_prefix_cache()
    assert hit(manager, range(20)) == 0
    assert manager.block_pool.num_cached_blocks == 0


# ---- eviction ------------------------------------------------------------------------------------


def test_a_checkpoint_that_saved_little_leaves_first():
    """States are large and alike; the one that saved 400 tokens outlives a newer one of 12."""
    manager = manager_of([full(), recurrent()], 14, blocks_per_page=[4, 4])
    manager.free(run_prompt(manager, "long", range(400)))
    manager.free(run_prompt(manager, "short", range(1000, 1012)))
    filler = 0
    while hit(manager, range(1000, 1013)) == 12:
        filler += 1
        manager.free(run_prompt(manager, f"f{filler}", range(2000 * filler, 2000 * filler + 12)))
        assert filler < 60
    assert hit(manager, range(401)) == 400


@pytest.mark.parametrize(
    "start, length, marks, diverged, interval, expected",
    [
        (0, 12, (), 0, None, [11]),
        (0, 1, (), 0, None, []),
        (11, 12, (), 0, None, []),
        (0, 100, (20, 99, 100, 5), 0, None, [5, 20, 99]),
        (10, 100, (5, 20), 0, None, [20, 99]),
        (0, 100, (), 48, None, [48, 99]),
        (0, 100, (50,), 48, None, [50, 99]),
        (0, 300, (), 200, None, [192, 299]),
        (192, 300, (), 208, None, [299]),
        (0, 97, (), 95, None, [64, 96]),
        (70, 97, (), 95, None, [96]),
        (0, 100, (), 0, 32, [32, 64, 99]),
        (40, 100, (), 64, 32, [64, 99]),
    ],
)
def test_positions(start, length, marks, diverged, interval, expected):
    policy = CheckpointPolicy(16, 1000, interval)
    assert policy.positions(start, length, marks, diverged) == expected


def test_credit_is_relative_to_a_block():
    policy = CheckpointPolicy(block_size=16, block_bytes=1000)
    assert policy.credit(16, 0, 100, 1000) == 1.0
    assert policy.credit(2000, 400, 100, 50_000) == 2.0
    assert CheckpointPolicy(16, 0).credit(7, 0, 100, 50) == 7.0


def test_the_end_of_a_prompt_leaves_first():
    """The end of the turn continues whatever the end of its prompt does, but the same prompt."""
    policy = CheckpointPolicy(block_size=16, block_bytes=1000)
    assert policy.credit(99, 0, 100, 1000) == 0.0 < policy.credit(105, 0, 100, 1000)


# ---- worth ---------------------------------------------------------------------------------------


def credits_of(manager):
    pages = manager.block_pool.pages
    return [block.credit for group in pages.groups for block in group.idle]


@pytest.mark.parametrize("rewind", [False, True])
def test_a_prefix_computed_again_is_worth_its_tokens(rewind):
    """What the first look-up found does not count once it is gone, by a reset or a failed load."""
    manager = hybrid()
    manager.free(run_prompt(manager, "a", range(200)))
    req = request("b", range(250), cache=marks([50, 100]))
    step(manager, req)
    assert req.num_computed_tokens > 190
    req.num_cached_tokens = 199
    if rewind:
        manager.forget_after(req, 40)
        req.num_computed_tokens = 40
        manager.plan_checkpoints(req, 40)
    else:
        manager.free(req)
        req.num_computed_tokens = 0
        assert manager.reset_prefix_cache()
    while req.num_computed_tokens < req.num_tokens:
        step(manager, req)
    manager.free(req)
    manager.begin_step()
    assert len(credits_of(manager)) > 3
    assert min(credits_of(manager)) >= 0


class Ranked:
    rank = (0.0, 0)


def test_items_of_equal_rank_leave_in_the_order_they_came():
    """No order is asked of the items themselves."""
    queue = IdleQueue()
    queued = [Ranked() for _ in range(3)]
    for item in queued:
        queue.add(item)
    left = []
    while (first := queue.first()) is not None:
        queue.remove(first)
        left.append(first)
    assert left == queued
