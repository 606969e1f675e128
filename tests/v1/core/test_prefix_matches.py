# SPDX-License-Identifier: Apache-2.0
"""A waiting request looks its prefix up again only when the cache has changed."""

from __future__ import annotations

import pytest

from tests.v1.core.state_cases import done, full, manager_of, recurrent, request, run
from vllm.v1.core.prefix_lookup import PrefixLookup


@pytest.fixture
def looked_up(monkeypatch):
    """Names of the requests looked up and reported, in order."""
    calls = {"search": [], "report": []}
    for name, found in calls.items():
        original = getattr(PrefixLookup, name)

        def counting(self, req, *args, original=original, found=found):
            found.append(req.request_id)
            return original(self, req, *args)

        monkeypatch.setattr(PrefixLookup, name, counting)
    return calls


def hit(manager, req):
    return manager.get_computed_blocks(req)[1]


def test_once_while_nothing_changes(looked_up):
    manager = manager_of([full()], 20)
    done(manager, "before", range(64))
    looked_up["search"].clear()
    waiting = request("a", range(64))
    assert [hit(manager, waiting) for _ in range(5)] == [48] * 5
    assert looked_up["search"] == ["a"]


def test_again_after_every_kind_of_change(looked_up):
    manager = manager_of([full(), recurrent()], 40, [1, 1])
    waiting = request("a", range(100))
    assert hit(manager, waiting) == 0
    done(manager, "b", range(64))
    assert hit(manager, waiting) == 64, "a block was cached, and a state"
    last = manager.get_computed_blocks(waiting)[0].sources[1]
    manager.block_pool.uncache_block(last)
    assert hit(manager, waiting) == 0, "the state was forgotten"
    done(manager, "c", range(80))
    assert hit(manager, waiting) == 80
    assert manager.reset_prefix_cache()
    assert hit(manager, waiting) == 0
    looked_up["search"].clear()
    waiting.append_output_token_ids(7)
    hit(manager, waiting)
    assert looked_up["search"] == ["a"], "a request that was preempted knows more tokens"


def test_again_after_a_full_block_was_cached():
    manager = manager_of([full()], 20)
    waiting = request("a", range(100))
    assert hit(manager, waiting) == 0
    running = request("b", range(64))
    assert run(manager, running)
    assert hit(manager, waiting) == 64


def test_again_after_a_partly_filled_block_was_cached():
    manager = manager_of([full(), recurrent()], 40, [1, 1])
    waiting = request("a", range(100))
    assert hit(manager, waiting) == 0
    done(manager, "b", range(10))
    assert hit(manager, waiting) == 10


def test_another_request_of_the_same_name_looks_for_itself():
    manager = manager_of([full()], 20)
    done(manager, "before", range(64))
    assert hit(manager, request("a", range(64))) == 48
    assert hit(manager, request("a", range(100, 164))) == 0


def test_refused_attempts_make_no_receipt(looked_up):
    manager = manager_of([full()], 9)
    done(manager, "before", range(32))
    holder = request("holder", range(500, 580))
    assert run(manager, holder)
    looked_up["report"].clear()
    waiting = request("a", range(80))
    for _ in range(3):
        assert not run(manager, waiting)
    assert looked_up["report"] == []
    manager.free(holder)
    assert run(manager, waiting)
    report = manager.take_report(waiting)
    assert looked_up["report"] == ["a"]
    assert (report.cached_tokens, report.lost_tokens) == (32, 0), "not what it has computed itself"


def test_the_receipt_does_not_know_the_requests_own_blocks():
    manager = manager_of([full()], 20)
    first = request("a", range(64))
    assert run(manager, first)
    report = manager.take_report(first)
    assert (report.prompt_tokens, report.cached_tokens, report.reason) == (64, 0, None)
