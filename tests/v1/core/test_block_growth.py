# SPDX-License-Identifier: Apache-2.0
"""One block at a time is taken like any number of blocks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.core.state_cases import full, manager_of, recurrent, request, window


def _grow(manager, requests, moves):
    """Block ids after every move: a request computes one more token, or starts, or ends."""
    seen = []
    for number, ends in moves:
        name = f"r{number}"
        req = requests.setdefault(name, request(name, range(100 * number, 100 * number + 15)))
        manager.begin_step()
        if ends:
            manager.free(req)
            del requests[name]
        else:
            new = 1 if req.num_computed_tokens else 15
            if manager.allocate_slots(req, new) is not None:
                req.num_computed_tokens += new
                req.append_output_token_ids(number)
        seen.append([manager.get_block_ids(r) for r in requests])
    return seen


@settings(max_examples=100, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([False] * 5 + [True])), min_size=10
    ),
    repeat=st.integers(1, 40),
    num_pages=st.integers(3, 12),
    capacities=st.sampled_from([[1, 1, 1], [4, 2, 1], [3, 5, 2]]),
    caching=st.booleans(),
)
def test_the_short_way_takes_the_same_blocks(moves, repeat, num_pages, capacities, caching):
    specs = [full(), window(20), recurrent()]
    one, other = (
        manager_of(specs, num_pages, capacities, enable_caching=caching) for _ in range(2)
    )
    other._growth.append_one = lambda *args: None
    moves = [move for move in moves for _ in range(1 if move[1] else repeat)]
    assert _grow(one, {}, moves) == _grow(other, {}, moves)
    assert one.usage == other.usage


def test_no_block_is_taken_when_there_is_none():
    manager = manager_of([full(), recurrent()], 3, [1, 1], enable_caching=False)
    req = request("a", range(16))
    assert manager.allocate_slots(req, 16) is not None
    req.num_computed_tokens = 16
    assert manager.allocate_slots(req, 1) is None
    assert [len(ids) for ids in manager.get_block_ids("a")] == [1, 1]


def test_a_jump_over_several_blocks_takes_them_all():
    manager = manager_of([full()], 9, [2])
    req = request("a", range(60))
    assert manager.allocate_slots(req, 10) is not None
    req.num_computed_tokens = 10
    assert [len(group) for group in manager.allocate_slots(req, 50).blocks] == [3]


def test_the_page_of_the_neighbour_comes_first():
    """A request's blocks stay together, even when another page is fuller."""
    pool = manager_of([full()], 4, [4]).block_pool
    blocks = pool.get_new_blocks([8], [None])[0]
    pool.free_blocks([blocks[0], blocks[1], blocks[7]])
    assert blocks[2].page != blocks[6].page
    assert pool.get_new_block(near=blocks[2]).page == blocks[2].page
    assert pool.get_new_block(near=blocks[6]).page == blocks[6].page
    assert pool.get_new_block(near=blocks[6]).page == blocks[2].page
    assert pool.get_new_block(near=pool.null_block) is None
