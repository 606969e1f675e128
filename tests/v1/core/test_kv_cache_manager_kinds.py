# SPDX-License-Identifier: Apache-2.0
"""What sliding windows and recurrent states change for a request's blocks and hits."""

import pytest
from state_cases import done, full, manager_of, recurrent, request, run, window

# ---- sliding windows -----------------------------------------------------------------------------


def test_blocks_outside_the_window_are_released():
    manager = manager_of([full(), window(20)], 50, enable_caching=False)
    req = request("a", range(64))
    assert run(manager, req, 40)
    assert manager.get_block_ids("a")[1].count(0) == 0
    assert run(manager, req, 24)  # token 40 sees 21 .. 40
    assert manager.get_block_ids("a")[1][0] == 0
    assert manager.get_block_ids("a")[1].count(0) == 1
    assert manager.get_block_ids("a")[0].count(0) == 0
    used = manager.usage
    manager.remove_skipped_blocks("a", 64)  # token 64 sees 45 .. 64
    assert manager.get_block_ids("a")[1].count(0) == 2
    assert manager.usage == pytest.approx(used - 1 / 49)
    manager.free(req)
    assert manager.usage == 0.0


@pytest.mark.parametrize("computed, nulls", [(34, 0), (35, 1), (50, 1), (51, 2)])
def test_window_edge(computed, nulls):
    """With a window of 20, token `computed` reads from `computed - 19` on."""
    manager = manager_of([window(20)], 50)
    req = request("a", range(100))
    assert run(manager, req, computed)
    manager.remove_skipped_blocks("a", computed)
    assert manager.get_block_ids("a")[0].count(0) == nulls


def test_window_hit_needs_only_its_blocks():
    manager = manager_of([full(), window(20)], 50)
    done(manager, "a", range(96))
    window_blocks = [
        manager.block_pool.get_cached_block(h, 1) for h in request("x", range(96)).block_hashes
    ]
    for block in window_blocks[:3]:
        manager.block_pool.uncache_block(block)
    req = request("b", range(90))
    blocks, hit = manager.get_computed_blocks(req)
    assert hit == 80  # 61 .. 79 in blocks 3 and 4
    assert [b.is_null for b in blocks.blocks[1]] == [True] * 3 + [False] * 2
    assert manager.allocate_slots(req, 10, hit, blocks)
    assert manager.get_block_ids("b")[1][:3] == [0, 0, 0]
    manager.free(req)
    manager.block_pool.uncache_block(window_blocks[3])
    assert manager.get_computed_blocks(request("c", range(90)))[1] == 0
    assert manager.get_computed_blocks(request("d", range(97)))[1] == 96


def test_window_hit_shorter_than_the_window():
    manager = manager_of([window(1000)], 50)
    done(manager, "a", range(48))
    assert manager.get_computed_blocks(request("b", range(48)))[1] == 32


def test_full_hit_shortens_the_window_and_back():
    manager = manager_of([full(), window(20)], 50)
    done(manager, "a", range(96))
    hashes = request("x", range(96)).block_hashes
    manager.block_pool.uncache_block(manager.block_pool.get_cached_block(hashes[4], 0))
    manager.block_pool.uncache_block(manager.block_pool.get_cached_block(hashes[3], 1))
    # full attention offers 64, the window then 48 (its block 3 is gone)
    assert manager.get_computed_blocks(request("b", range(96)))[1] == 48


def test_external_tokens_outside_the_window_get_no_block():
    manager = manager_of([full(), window(20)], 50)
    req = request("a", range(100))
    blocks = manager.allocate_slots(req, 4, num_external_computed_tokens=96)
    assert blocks.get_block_ids()[1][:4] == [0, 0, 0, 0]
    assert 0 not in blocks.get_block_ids()[1][4:]
    assert [len(group) for group in blocks.blocks] == [7, 7]


def test_hits_outside_the_window_are_not_held():
    """A connector continues after the local hit, whose blocks the next token no longer sees."""
    manager = manager_of([full(), window(20)], 50)
    done(manager, "a", range(33))
    req = request("b", range(100))
    blocks, hit = manager.get_computed_blocks(req)
    assert (hit, [b.is_null for b in blocks.blocks[1]]) == (32, [False, False])
    assert manager.allocate_slots(req, 4, hit, blocks, num_external_computed_tokens=64)
    assert manager.get_block_ids("b")[1][:4] == [0, 0, 0, 0]
    assert manager.usage == pytest.approx((7 + 3) / 49)


# ---- recurrent states ----------------------------------------------------------------------------


def test_one_state_for_life():
    manager = manager_of([recurrent(), full()], 50)
    req = request("a", range(200))
    for _ in range(10):
        assert run(manager, req, 20)
        assert len(manager.get_block_ids("a")[0]) == 1


def test_requests_share_pages():
    manager = manager_of([recurrent(), full()], 10, blocks_per_page=[1, 50])
    for name in "abcdefgh":
        assert run(manager, request(name, range(90)))
    assert not run(manager, request("i", range(90)))
    assert manager.usage == pytest.approx((8 + 8 * 6 / 50) / 9)
