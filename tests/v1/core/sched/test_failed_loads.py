# SPDX-License-Identifier: Apache-2.0
"""Loads of a KV connector that fail: who hears of it, what is computed again, what stays cached."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.v1.core.sched.connector_driver import (
    expect,
    fill,
    launch_loading,
    make_driver,
    prompt_of,
    report,
)
from tests.v1.core.sched.helpers import make_request
from tests.v1.engine.fakes import BLOCK_SIZE
from vllm.v1.core.sched.kv_transfer import KVTransfer
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
STATE = MambaSpec(block_size=512, shapes=((4,),), dtypes=(torch.float32,))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_failed_synchronous_load_is_recomputed_without_asking_again(async_scheduling):
    driver = make_driver(policy="recompute", async_scheduling=async_scheduling)
    prompt = prompt_of(0, 60)
    request = make_request("a", prompt)
    driver.connector.matches["a"] = [(48, False)]
    driver.add(request)
    blocks = launch_loading(driver, request, 48)
    if async_scheduling:
        driver.launch()
    for offset in range(BLOCK_SIZE):  # the second block never arrived
        del driver.worker.slots[blocks[1] * BLOCK_SIZE + offset]
    assert report(driver, invalid_block_ids={blocks[1]}) == []
    if async_scheduling:
        assert driver.collect() == []
    assert request.num_computed_tokens == 16 and request.status is RequestStatus.RUNNING
    again = driver.step()
    assert again.num_scheduled_tokens == {"a": 44}
    assert again.scheduled_cached_reqs.resumed_req_ids == again.preempted_req_ids == {"a"}
    driver.run()
    expect(driver, "a", prompt)
    assert len([c for c in driver.connector.calls if c[0] == "match"]) == 1
    # nothing stale was left for a later request to hit
    driver.add(make_request("b", prompt))
    driver.run()
    expect(driver, "b", prompt)


def test_failed_asynchronous_load_keeps_the_valid_prefix():
    driver = make_driver(policy="recompute")
    prompt = prompt_of(0, 60)
    request = make_request("a", prompt)
    driver.connector.matches["a"] = [(48, True)]
    driver.add(request)
    driver.step()
    blocks = driver.scheduler.kv_cache_manager.get_block_ids("a")[0]
    fill(driver, request, 16)
    report(driver, invalid_block_ids={blocks[1], blocks[2]}, finished_recving={"a"})
    assert driver.step().num_scheduled_tokens == {"a": 44}
    driver.run()
    expect(driver, "a", prompt)


def test_a_connector_that_always_matches_what_fails_is_not_asked_for_ever():
    driver = make_driver(policy="recompute")
    prompt = prompt_of(0, 60)
    driver.connector.matches["a"] = [(48, True)] * 9
    driver.add(make_request("a", prompt))
    for _ in range(2):
        driver.step()
        blocks = driver.scheduler.kv_cache_manager.get_block_ids("a")[0]
        report(driver, invalid_block_ids=set(blocks[:3]), finished_recving={"a"})
    assert driver.step().num_scheduled_tokens == {"a": 60}
    driver.run()
    expect(driver, "a", prompt)
    assert len([call for call in driver.connector.calls if call[0] == "match"]) == 2
    assert [call[3] for call in driver.connector.calls if call[0] == "alloc"] == [48, 48, 0]


def test_failed_load_ends_the_request_under_policy_fail():
    driver = make_driver(policy="fail")
    request = make_request("a", prompt_of(0, 60))
    driver.connector.matches["a"] = [(48, False)]
    driver.add(request, make_request("b", prompt_of(1, 20)))
    launch_loading(driver, request, 48)
    bad = driver.scheduler.kv_cache_manager.get_block_ids("a")[0][0]
    report(driver, invalid_block_ids={bad})
    assert driver.reason("a") is FinishReason.ERROR and "loading" in driver.finished["a"].error
    driver.run()
    expect(driver, "b", prompt_of(1, 20))
    assert driver.scheduler.kv_cache_manager.usage == 0
    driver.worker.slots.clear()  # what failed to load must not be found by the next request
    driver.add(make_request("again", prompt_of(0, 60)))
    driver.run()
    expect(driver, "again", prompt_of(0, 60))


@pytest.mark.parametrize("aborted", [False, True])
def test_a_load_that_failed_is_not_cached_when_its_request_ends(aborted):
    """An asynchronous load is cached when it is done, or when its request goes: never if it is bad,
    also when the client left before the report."""
    driver = make_driver(policy="fail")
    prompt = prompt_of(0, 60)
    request = make_request("a", prompt)
    driver.connector.matches["a"] = [(48, True)]
    driver.add(request)
    driver.step()
    blocks = driver.scheduler.kv_cache_manager.get_block_ids("a")[0]
    fill(driver, request, 16)
    if aborted:
        driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    report(driver, invalid_block_ids=set(blocks[1:3]), finished_recving={"a"})
    driver.run()
    assert driver.scheduler.requests == {}
    driver.add(make_request("again", prompt))
    driver.run()
    assert driver.finished["again"].num_cached_tokens == 16
    expect(driver, "again", prompt)


def test_ids_without_a_group_count_for_what_is_being_loaded():
    """Block ids repeat from group to group: another request's block of that number is fine."""
    driver = make_driver(policy="fail", async_scheduling=False)
    driver.add(make_request("other", prompt_of(1, 40), ignore_eos=True))
    driver.step()
    request = make_request("a", prompt_of(0, 60))
    driver.connector.matches["a"] = [(48, False)]
    driver.add(request)
    launch_loading(driver, request, 48)
    others = driver.scheduler.kv_cache_manager.get_block_ids("other")[0]
    report(driver, invalid_block_ids={others[0]})
    driver.run()
    expect(driver, "a", prompt_of(0, 60))
    assert driver.reason("other") is FinishReason.LENGTH


def test_blocks_with_their_group_are_found_wherever_they_are_used():
    driver = make_driver(policy="fail")
    driver.add(make_request("a", prompt_of(0, 60)), make_request("b", prompt_of(1, 60)))
    driver.step()
    bad = driver.scheduler.kv_cache_manager.get_block_ids("b")[0][1]
    report(driver, invalid_blocks={(1, bad)})
    assert not driver.finished
    report(driver, invalid_blocks={(0, bad)})
    assert driver.reason("b") is FinishReason.ERROR and "a" not in driver.finished
    driver.run()


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_a_load_is_not_cached_if_its_request_goes_before_the_outcome_is_known(how):
    driver = make_driver(policy="recompute")
    prompt = prompt_of(0, 60)
    driver.connector.matches["a"] = [(48, False), (0, False)]
    request = make_request("a", prompt)
    driver.add(request)
    bad = launch_loading(driver, request, 48)[:3]
    for block in bad:  # nothing came
        for offset in range(BLOCK_SIZE):
            del driver.worker.slots[block * BLOCK_SIZE + offset]
    if how == "abort":
        driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    else:
        driver.scheduler._preempt_last()
    report(driver, invalid_block_ids=set(bad))
    driver.add(make_request("again", prompt))
    driver.run()
    expect(driver, "again", prompt)


@pytest.mark.parametrize("beside_steps", [False, True])
def test_an_earlier_step_of_a_request_does_not_end_its_load(beside_steps):
    """It was preempted while the step ran, and what it loads since may still fail."""
    driver = make_driver(policy="recompute", async_scheduling=True)
    prompt = prompt_of(0, 60)
    request = make_request("a", prompt)
    driver.connector.matches["a"] = [(0, False), (48, beside_steps), (0, False)]
    driver.add(request)
    driver.launch()
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.worker.slots.clear()
    bad = launch_loading(driver, request, 48)[1:3]
    for position in range(16, 48):  # two blocks never arrived
        del driver.worker.slots[bad[position // 16 - 1] * BLOCK_SIZE + position % BLOCK_SIZE]
    driver.collect()
    received = {"a"} if beside_steps else None
    report(driver, invalid_block_ids=set(bad), finished_recving=received)
    driver.run()
    expect(driver, "a", prompt)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_who_shares_a_load_hears_that_it_failed_though_its_request_is_gone(how, policy):
    driver = make_driver(policy=policy, async_scheduling=True)
    prompt = prompt_of(0, 60)
    request = make_request("a", prompt)
    driver.connector.matches["a"] = [(48, False), (0, False)]
    driver.add(request)
    blocks = launch_loading(driver, request, 48)
    driver.add(make_request("b", [*prompt, 7]))
    driver.launch()
    assert driver.scheduler.kv_cache_manager.get_block_ids("b")[0][:3] == blocks[:3]
    for offset in range(BLOCK_SIZE):  # the second block never arrived
        del driver.worker.slots[blocks[1] * BLOCK_SIZE + offset]
    if how == "abort":
        driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    else:
        driver.scheduler.running.remove(request)
        driver.scheduler._preempt(request)
    report(driver, invalid_block_ids={blocks[1]})
    driver.run()
    if policy == "fail":
        assert driver.reason("b") is FinishReason.ERROR
    else:
        expect(driver, "b", [*prompt, 7])


@pytest.mark.parametrize("with_group", [False, True])
@pytest.mark.parametrize("num_loaded", [0, 16])
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_who_has_the_blocks_of_a_load_anew_does_not_hear_that_it_failed(
    how, num_loaded, with_group
):
    """The request it was for is gone, and nobody shared the blocks: another computes what is in
    them now, or loads it in a later step."""
    driver = make_driver(policy="fail", async_scheduling=True)
    request = make_request("a", prompt_of(0, 60))
    driver.connector.matches |= {"a": [(48, False), (0, False)], "b": [(num_loaded, False)]}
    driver.add(request)
    blocks = launch_loading(driver, request, 48)
    if how == "preempt":
        driver.scheduler._preempt_last()
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    other = make_request("b", prompt_of(1, 60))
    driver.add(other)
    assert launch_loading(driver, other, num_loaded) == blocks
    bad = set(blocks[:3])
    if with_group:
        report(driver, invalid_blocks={(0, block) for block in bad})
    else:
        report(driver, invalid_block_ids=bad)
    driver.run()
    expect(driver, "b", prompt_of(1, 60))


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_who_shared_a_load_and_has_its_blocks_anew_does_not_hear_that_it_failed(how):
    """It gave them up after the load's own request had, and computes what is in them now."""
    driver = make_driver(policy="fail", async_scheduling=True)
    prompt = prompt_of(0, 60)
    request, other = make_request("a", prompt), make_request("b", [*prompt, 7])
    driver.connector.matches |= {"a": [(48, False), (0, False)], "b": [(0, False)] * 2}
    driver.add(request, other)
    blocks = launch_loading(driver, request, 48)
    manager = driver.scheduler.kv_cache_manager
    assert manager.get_block_ids("b")[0][:3] == blocks[:3]
    bad = set(blocks[:3])
    if how == "preempt":
        driver.scheduler.running.remove(request)
        driver.scheduler._preempt(request)
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    driver.scheduler._preempt_last()
    driver.worker.slots.clear()
    driver.launch()
    assert bad & set(manager.get_block_ids("b")[0])
    report(driver, invalid_block_ids=bad)
    driver.run()
    expect(driver, "b", [*prompt, 7])


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_what_was_computed_after_a_load_is_not_cached_before_its_outcome_is_known(how):
    """Who shares the load's blocks gives its own back before it hears that the load failed."""
    driver = make_driver(policy="recompute", async_scheduling=True)
    prompt = prompt_of(0, 60)
    longer = [*prompt[:48], *prompt_of(1, 60)]
    request, other = make_request("a", prompt), make_request("b", longer)
    driver.connector.matches["a"] = [(48, False), (0, False)]
    driver.add(request)
    blocks = launch_loading(driver, request, 48)
    driver.add(other)
    driver.launch()
    held = driver.scheduler.kv_cache_manager.get_block_ids("b")[0]
    assert held[:3] == blocks[:3]
    for block in held[1:]:  # nothing came, and what was computed of it is wrong
        for slot in range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE):
            driver.worker.slots.pop(slot, None)
    if how == "abort":
        driver.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    else:
        driver.scheduler._preempt_last()
    report(driver, invalid_block_ids=set(blocks[1:3]))
    driver.run()
    expect(driver, "a", prompt)
    driver.add(make_request("again", longer))
    driver.run()
    expect(driver, "again", longer)


def test_groups_of_failed_blocks():
    """A failed state block 5 leaves another request's attention block 5 alone."""
    held = {"loads": ([3, 4], [5]), "runs": ([5, 6], [7])}
    manager = SimpleNamespace(block_pool=None, get_block_ids=held.__getitem__)
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in (ATTENTION, STATE)]
    transfer = KVTransfer(make_driver().connector, SimpleNamespace(kv_cache_groups=groups), manager)
    manager.get_blocks = lambda _: SimpleNamespace(get_block_ids=lambda: ([],))
    requests = {name: make_request(name, prompt_of(0, 40)) for name in held}
    transfer.after_allocation(requests["loads"], 32, 32, 0)
    requests["loads"].num_computed_tokens = requests["runs"].num_computed_tokens = 32
    for reported in (
        KVConnectorOutput(invalid_block_ids={5, 6}),
        KVConnectorOutput(invalid_blocks={(1, 5)}),
    ):
        failed = transfer.failed_blocks(reported)
        assert failed == {(1, 5)}
        assert transfer.num_valid_tokens(requests["loads"], failed) == 0
        assert transfer.num_valid_tokens(requests["runs"], failed) is None
