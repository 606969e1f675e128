# SPDX-License-Identifier: Apache-2.0
"""Blocks of requests over all groups: growth, refusal, prefix hits, what may be hashed."""

import pytest
from state_cases import done, full, hidden, manager_of, recurrent, request, run, step

from vllm.cache_options import CacheOptions
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus

# ---- growth --------------------------------------------------------------------------------------


def test_returns_only_what_was_appended():
    manager = manager_of([full(), hidden(), recurrent()], 50)
    req = request("a", range(33))
    blocks = manager.allocate_slots(req, 20)
    assert [len(group) for group in blocks.get_block_ids()] == [2, 2, 1]
    req.num_computed_tokens = 20
    assert [len(g) for g in manager.allocate_slots(req, 13).get_block_ids()] == [1, 1, 0]
    req.num_computed_tokens = 33
    assert manager.allocate_slots(req, 1).get_block_ids(allow_none=True) is None
    assert [len(group) for group in manager.get_block_ids("a")] == [3, 3, 1]
    assert manager.get_blocks("a").get_block_ids() == manager.get_block_ids("a")


def test_lookahead_and_external_tokens_get_slots_but_never_past_the_limit():
    manager = manager_of([full()], 50, max_model_len=64)
    req = request("a", range(40))
    assert len(manager.allocate_slots(req, 40, num_lookahead_tokens=9).blocks[0]) == 4
    other = request("b", range(60))
    blocks = manager.allocate_slots(
        other, 12, num_external_computed_tokens=48, num_lookahead_tokens=100
    )
    assert len(blocks.blocks[0]) == 4


def test_speculative_states():
    manager = manager_of([recurrent(num_speculative_blocks=2)], 10)
    req = request("a", range(5))
    assert run(manager, req)
    assert len(manager.get_block_ids("a")[0]) == 3


def test_amounts_are_checked():
    manager = manager_of([full()], 10, max_num_batched_tokens=32)
    with pytest.raises(ValueError, match="new or external"):
        manager.allocate_slots(request("a", range(5)), 0)
    with pytest.raises(ValueError, match="max_num_batched_tokens = 32"):
        manager.allocate_slots(request("a", range(50)), 33)
    with pytest.raises(ValueError, match="watermark"):
        manager_of([full()], 10, watermark=1.0)


def test_unknown_requests():
    manager = manager_of([full(), recurrent()], 10)
    manager.free(request("a", range(5)))
    assert manager.get_block_ids("a") == ([], [])
    assert manager.get_blocks("a").blocks == ([], [])


def test_model_without_state():
    manager = manager_of([], 1, blocks_per_page=[])
    req = request("a", range(5))
    assert run(manager, req)
    assert (manager.get_block_ids("a"), manager.usage) == ((), 0.0)
    manager.free(req)
    assert manager.reset_prefix_cache()


# ---- refusal -------------------------------------------------------------------------------------


def test_refusal_changes_nothing_in_any_group():
    manager = manager_of([full(), hidden()], 8, blocks_per_page=[1, 2])
    holder = request("a", range(32))
    assert run(manager, holder)
    before = manager.usage
    assert not run(manager, request("b", range(80)))  # 5 + 3 pages of 4
    assert manager.usage == before
    assert manager.get_block_ids("b") == ([], [])
    assert run(manager, request("c", range(32)))  # 2 pages, and one shared
    grown = manager.get_block_ids("a")
    assert manager.allocate_slots(holder, 400) is None
    assert manager.get_block_ids("a") == grown


def test_refused_request_does_not_hold_its_hits():
    manager = manager_of([full()], 6)
    done(manager, "a", range(48))
    req = request("b", range(200))
    assert not run(manager, req)
    assert manager.usage == 0.0
    assert manager.get_computed_blocks(request("c", range(49)))[1] == 48


def test_watermark_holds_back_only_newcomers_while_others_run():
    manager = manager_of([full()], 11, watermark=0.3)
    first = request("a", range(128))
    assert run(manager, first)  # 8 of 10 pages, nobody else runs
    assert not run(manager, request("b", range(16)))
    assert manager.allocate_slots(first, 32) is not None


# ---- prefix hits ---------------------------------------------------------------------------------


def test_hit_never_covers_the_last_token():
    manager = manager_of([full()], 50)
    done(manager, "a", range(48))
    for length, hit in ((48, 32), (49, 48), (47, 32), (16, 0), (17, 16)):
        assert manager.get_computed_blocks(request("b", range(length)))[1] == hit


def test_hit_blocks_are_shared_and_survive_until_the_last_holder():
    manager = manager_of([full(), hidden()], 50)
    first, second = request("a", range(40)), request("b", [*range(32), 7, 8, 9])
    assert run(manager, first)
    assert run(manager, second)
    for a, b in zip(manager.get_block_ids("a"), manager.get_block_ids("b"), strict=True):
        assert a[:2] == b[:2]
        assert a[2] != b[2]
    manager.free(first)
    assert manager.usage == pytest.approx(6 / 49)
    manager.free(second)
    assert manager.usage == 0.0


def test_in_the_same_step_later_requests_hit_earlier_ones():
    manager = manager_of([full()], 50)
    assert manager.allocate_slots(request("a", range(40)), 40)
    assert manager.get_computed_blocks(request("b", range(40)))[1] == 32


def test_different_salt_or_adapter_never_hit():
    manager = manager_of([full()], 50)
    done(manager, "a", range(48))
    assert manager.get_computed_blocks(request("b", range(48), cache_salt="x"))[1] == 0


def test_caching_off():
    manager = manager_of([full()], 50, enable_caching=False)
    req = request("a", range(48))
    assert run(manager, req)
    manager.cache_blocks(req, 48)
    assert manager.get_computed_blocks(request("b", range(48)))[1] == 0
    assert manager.block_pool.num_cached_blocks == 0


def test_prompt_logprobs_do_not_read_but_write_the_cache():
    manager = manager_of([full()], 50)
    params = SamplingParams(prompt_logprobs=1, max_tokens=1)
    for name in "ab":
        req = request(name, range(48), sampling_params=params)
        assert manager.get_computed_blocks(req)[1] == 0
        assert run(manager, req)
    assert manager.get_computed_blocks(request("c", range(48)))[1] == 32


def test_prefixes_survive_longest():
    """Of a freed request the last blocks are evicted first."""
    manager = manager_of([full()], 5)
    done(manager, "a", range(64))
    done(manager, "b", range(1000, 1016))
    assert manager.get_computed_blocks(request("c", range(65)))[1] == 48


def test_recent_prefixes_survive_older_ones():
    manager = manager_of([full()], 5)
    done(manager, "a", range(32))
    done(manager, "b", range(100, 132))
    done(manager, "a2", range(33))  # touches a
    done(manager, "c", range(200, 216))
    assert manager.get_computed_blocks(request("d", range(33)))[1] == 32
    assert manager.get_computed_blocks(request("e", range(100, 133)))[1] < 32


def test_stale_hits_are_refused():
    manager = manager_of([full()], 4)
    done(manager, "a", range(48))
    req = request("b", range(49))
    blocks, hit = manager.get_computed_blocks(req)
    assert run(manager, request("c", range(500, 548)))
    with pytest.raises(ValueError, match="evicted between"):
        manager.allocate_slots(req, 1, hit, blocks)


def test_running_request_cannot_take_hits():
    manager = manager_of([full()], 10)
    done(manager, "a", range(48))
    req = request("b", range(49))
    blocks, hit = manager.get_computed_blocks(req)
    assert manager.allocate_slots(req, 1, hit, blocks)
    with pytest.raises(ValueError, match="has blocks already"):
        manager.allocate_slots(req, 1, hit, blocks)


def test_evicted_ids_are_not_hit():
    manager = manager_of([full(), hidden()], 50)
    req = request("a", range(48))
    assert run(manager, req)
    manager.evict_blocks([manager.get_block_ids("a")[1][1]])
    assert manager.get_computed_blocks(request("b", range(48)))[1] == 16
    assert len(manager.get_block_ids("a")[0]) == 3


def test_reset():
    manager = manager_of([full()], 50)
    req = request("a", range(48))
    assert run(manager, req)
    assert manager.reset_prefix_cache() is False
    assert manager.get_computed_blocks(request("b", range(48)))[1] == 32
    manager.free(req)
    assert manager.reset_prefix_cache() is True
    assert manager.get_computed_blocks(request("b", range(48)))[1] == 0


# ---- what may be hashed --------------------------------------------------------------------------


def test_tokens_in_flight_are_not_hashed():
    manager = manager_of([full()], 50)
    req = request("a", range(30))
    assert run(manager, req)
    for _ in range(3):  # tokens 30, 31, 32: scheduled, values unknown
        assert manager.allocate_slots(req, 1)
        req.num_computed_tokens += 1
    assert manager.block_pool.num_cached_blocks == 1
    req.append_output_token_ids([5, 6])
    assert manager.allocate_slots(req, 1)
    assert manager.block_pool.num_cached_blocks == 2


def test_partly_computed_blocks_are_not_hashed():
    manager = manager_of([full()], 50)
    req = request("a", range(64))
    assert run(manager, req, 40)
    assert manager.block_pool.num_cached_blocks == 2
    assert run(manager, req, 8)
    assert manager.block_pool.num_cached_blocks == 3


def test_delayed_caching():
    manager = manager_of([full()], 50)
    req = request("a", range(48))
    manager.allocate_slots(req, 0, num_external_computed_tokens=48, delay_cache_blocks=True)
    assert manager.block_pool.num_cached_blocks == 0
    req.num_computed_tokens = 47
    manager.cache_blocks(req, 47)
    assert manager.get_computed_blocks(request("b", range(48)))[1] == 32
    assert manager.allocate_slots(req, 1)
    assert manager.block_pool.num_cached_blocks == 3
    assert len(manager.get_block_ids("a")[0]) == 3


def test_load_within_the_step_is_cached_at_once():
    manager = manager_of([full()], 50)
    done(manager, "a", range(16))
    req = request("b", range(48))
    blocks, hit = manager.get_computed_blocks(req)
    new = manager.allocate_slots(req, 16, hit, blocks, num_external_computed_tokens=16)
    assert (hit, len(new.blocks[0])) == (16, 2)
    assert manager.block_pool.num_cached_blocks == 3


def test_scheduled_but_not_computed_blocks_are_forgotten():
    """Preempted in the step that scheduled it: its new blocks never got their content."""
    manager = manager_of([full()], 50)
    done(manager, "warm", range(16))
    req = request("a", range(64))
    blocks, hit = manager.get_computed_blocks(req)
    assert manager.allocate_slots(req, 16, hit, blocks)
    req.num_computed_tokens = 32
    assert manager.allocate_slots(req, 32)  # this step is undone
    manager.free(req)
    assert manager.get_computed_blocks(request("b", range(64)))[1] == 32


def test_found_blocks_are_not_forgotten_when_admission_is_undone():
    manager = manager_of([full()], 50)
    done(manager, "warm", range(48))
    req = request("a", range(64))
    blocks, hit = manager.get_computed_blocks(req)
    assert manager.allocate_slots(req, 16, hit, blocks)
    manager.free(req)
    assert manager.get_computed_blocks(request("b", range(64)))[1] == 48


def test_recomputed_tokens_are_hashed_again():
    manager = manager_of([full()], 50)
    req = request("a", range(64))
    assert run(manager, req)
    manager.forget_after(req, 16)
    req.num_computed_tokens = 16
    assert run(manager, req)
    assert manager.get_computed_blocks(request("b", range(65)))[1] == 64


# ---- block lists ---------------------------------------------------------------------------------


def test_block_lists():
    a, b, null = KVCacheBlock(1), KVCacheBlock(2), KVCacheBlock(0, is_null=True)
    b.block_hash = b"x"
    one, two = KVCacheBlocks(([a], [null])), KVCacheBlocks(([b], [a, b]))
    both = one + two
    assert both.get_block_ids() == ([1, 2], [0, 1, 2])
    assert one.get_block_ids() == ([1], [0])
    assert both.get_unhashed_block_ids_all_groups() == [[1], [1]]
    assert KVCacheBlocks(([a, b],)).get_unhashed_block_ids() == [1]
    with pytest.raises(ValueError, match="2 groups"):
        one.get_unhashed_block_ids()
    assert both.new_empty().get_block_ids() == ([], [])
    assert both.new_empty().get_block_ids(allow_none=True) is None


@pytest.mark.parametrize("specs", [[full()], [full(), recurrent()]])
def test_a_reset_forgets_what_a_transfer_still_reads(specs):
    """The blocks of a finished request stay its own, as they are, but nobody finds them, also after
    it let go of them."""
    manager = manager_of(specs, 40)
    req = request("a", range(40), cache=CacheOptions(pin_seconds=60))
    step(manager, req)
    manager.free(request("b", range(40)))
    computed, blocks = req.num_computed_tokens, manager.get_block_ids("a")
    assert not manager.reset_prefix_cache()
    req.status = RequestStatus.FINISHED_STOPPED
    assert manager.reset_prefix_cache([req])
    assert req.num_computed_tokens == computed and manager.get_block_ids("a") == blocks
    assert manager.block_pool.num_cached_blocks == 0
    manager.free(req)
    assert manager.block_pool.num_cached_blocks == 0
    assert manager.block_pool.pages.num_live_blocks == 0
