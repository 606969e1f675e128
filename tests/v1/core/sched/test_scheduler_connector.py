# SPDX-License-Identifier: Apache-2.0
"""The scheduler and its KV connector: order of calls, loads, delayed frees, failures."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.kv_transfer.programmed_connector import NumberStats
from tests.v1.core.sched.helpers import Driver, make_request, make_scheduler
from tests.v1.engine.fakes import BLOCK_SIZE, EOS, expected_tokens, prefix_hash
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.kv_transfer import KVTransfer
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

ATTENTION = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
STATE = MambaSpec(block_size=512, shapes=((4,),), dtypes=(torch.float32,))


def make_driver(connector="AllGroupsConnector", policy="fail", **options):
    config = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path="tests.v1.core.sched.fake_connector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
    )
    driver = Driver(make_scheduler(kv_transfer_config=config, **options))
    driver.connector = driver.scheduler.connector
    return driver


def report(driver, **fields):
    """Deliver a connector report with the oldest step in flight (or an empty one)."""
    if not driver.in_flight:
        driver.launch()
    driver.in_flight[0][1].kv_connector_output = KVConnectorOutput(**fields)
    return driver.collect()


def fill(driver, request, num_tokens):
    """What a load would write: the slots of the request's first tokens."""
    blocks = driver.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    for position in range(num_tokens):
        slot = blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        driver.worker.slots[slot] = prefix_hash(request.all_token_ids[: position + 1])


def prompt_of(seed, length):
    return random.Random(seed).choices(range(20, 1000), k=length)


def expect(driver, request_id, prompt, max_tokens=8):
    params = SamplingParams(max_tokens=max_tokens)
    assert driver.tokens[request_id] == expected_tokens(prompt, params, eos=EOS)


def test_order_of_calls_without_any_match():
    driver = make_driver()
    driver.add(make_request("a", prompt_of(0, 20), max_tokens=2, ignore_eos=True))
    driver.run()
    names = [call[0] for call in driver.connector.calls]
    assert names == ["new", "match", "alloc", "meta", "meta", "finished", "meta"]
    assert driver.connector.calls[1:3] == [("match", "a", 0), ("alloc", "a", 2, 0)]
    assert driver.connector.calls[5] == ("finished", "a", "FINISHED_LENGTH_CAPPED", ([1, 2],))
    assert all(step.kv_connector_metadata is not None for step in driver.worker.steps)


def test_single_group_connector_gets_one_list():
    driver = make_driver("OneGroupConnector", disable_hybrid_kv_cache_manager=True)
    driver.add(make_request("a", prompt_of(0, 20), max_tokens=1))
    driver.run()
    assert ("finished", "a", "FINISHED_LENGTH_CAPPED", [1, 2]) in driver.connector.calls


def test_synchronous_match_counts_as_computed():
    driver = make_driver()
    prompt = prompt_of(0, 50)
    request = make_request("a", prompt)
    driver.connector.matches["a"] = [(32, False)]
    driver.add(request)
    output = driver.scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 18}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 32
    assert ("alloc", "a", 4, 32) in driver.connector.calls
    fill(driver, request, 32)
    driver.in_flight.append((output, driver.worker.execute(output)))
    driver.run()
    expect(driver, "a", prompt)
    assert driver.finished["a"].num_cached_tokens == 32


@pytest.mark.parametrize("match", [(51, True), (50, False), (-1, False)])
def test_a_match_that_cannot_be_ends_its_request_alone(match):
    driver = make_driver()
    driver.connector.matches["a"] = [match]
    for request_id in "ab":
        driver.add(make_request(request_id, prompt_of(0, 50)))
    driver.run()
    assert driver.finished["a"].finish_reason is FinishReason.ERROR
    expect(driver, "b", prompt_of(0, 50))


def test_none_means_ask_again_later_and_others_go_first():
    driver = make_driver()
    driver.connector.matches["slow"] = [(None, False), (None, False), (0, False)]
    driver.add(make_request("slow", prompt_of(0, 20)), make_request("next", prompt_of(1, 20)))
    assert list(driver.step().num_scheduled_tokens) == ["next"]
    assert list(driver.step().num_scheduled_tokens) == ["next"]
    assert list(driver.step().num_scheduled_tokens) == ["next", "slow"]
    driver.run()
    assert set(driver.finished) == {"slow", "next"}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("length", [32, 40])
def test_asynchronous_load_waits_for_its_report(async_scheduling, length):
    driver = make_driver(async_scheduling=async_scheduling)
    prompt = prompt_of(0, length)
    request = make_request("a", prompt)
    driver.connector.matches["a"] = [(32, True)]
    driver.add(request, make_request("b", prompt_of(1, 20), max_tokens=30, ignore_eos=True))
    for _ in range(4):
        assert "a" not in driver.step().num_scheduled_tokens
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(driver.scheduler.running) + len(driver.scheduler.waiting) == 2
    fill(driver, request, 32)
    report(driver, finished_recving={"a"})
    output = driver.step()
    # the last prompt token is computed again even if it was loaded
    assert output.num_scheduled_tokens["a"] == max(length - 32, 1)
    assert [r.req_id for r in output.scheduled_new_reqs] == ["a"]
    driver.run()
    expect(driver, "a", prompt)
    assert [c for c in driver.connector.calls if c[0] == "match" and c[1] == "a"] == [
        ("match", "a", 0)
    ]
    assert driver.scheduler.kv_cache_manager.usage == 0


def test_engine_keeps_stepping_while_only_a_load_is_pending():
    driver = make_driver()
    driver.connector.matches["a"] = [(16, True)]
    request = make_request("a", prompt_of(0, 20))
    driver.add(request)
    for _ in range(3):
        assert driver.step().total_num_scheduled_tokens == 0
        assert driver.scheduler.has_requests()
    fill(driver, request, 16)
    report(driver, finished_recving={"a"})
    driver.run()
    assert "a" in driver.finished


def test_abort_during_a_load_frees_when_it_ends():
    driver = make_driver()
    driver.connector.matches["a"] = [(32, True)]
    driver.add(make_request("a", prompt_of(0, 40)))
    driver.step()
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    driver.step()
    assert driver.scheduler.has_requests() and driver.scheduler.kv_cache_manager.usage > 0
    report(driver, finished_recving={"a"})
    driver.run()
    assert driver.scheduler.kv_cache_manager.usage == 0 and driver.scheduler.requests == {}


def test_delayed_free_keeps_blocks_until_sent_and_returns_parameters():
    driver = make_driver()
    driver.connector.finish["a"] = (True, {"path": "x"})
    driver.add(make_request("a", prompt_of(0, 20), max_tokens=1))
    driver.step()
    assert driver.finished["a"].kv_transfer_params == {"path": "x"}
    for _ in range(3):
        assert driver.scheduler.has_requests() and not driver.scheduler.has_unfinished_requests()
        assert driver.step().total_num_scheduled_tokens == 0
        assert driver.scheduler.kv_cache_manager.usage > 0
    with pytest.raises(ValueError, match="still in use"):
        driver.add(make_request("a", [1]))
    report(driver, finished_sending={"a"})
    driver.run()
    assert not driver.scheduler.has_requests()
    assert driver.scheduler.kv_cache_manager.usage == 0


def test_statistics_follow_blocks_that_come_back_without_a_step():
    driver = make_driver()
    driver.connector.finish["a"] = (True, None)
    driver.add(make_request("a", prompt_of(0, 20), max_tokens=1))
    driver.step()
    output = driver.scheduler.schedule()
    assert driver.scheduler.update_from_output(output, driver.worker.execute(output)) == {}
    output = driver.scheduler.schedule()
    result = driver.worker.execute(output)
    result.kv_connector_output = KVConnectorOutput(finished_sending={"a"})
    packed = driver.scheduler.update_from_output(output, result)
    assert packed[0].scheduler_stats.kv_cache_usage == 0


def test_finish_is_reported_once_also_for_requests_that_never_ran():
    driver = make_driver(max_num_seqs=1)
    driver.add(make_request("run", prompt_of(0, 20)), make_request("wait", prompt_of(1, 20)))
    driver.step()
    driver.scheduler.finish_requests(["run", "wait"], RequestStatus.FINISHED_ABORTED)
    driver.scheduler.finish_requests(["run", "wait"], RequestStatus.FINISHED_ABORTED)
    driver.run()
    finished = [call for call in driver.connector.calls if call[0] == "finished"]
    assert finished == [
        ("finished", "run", "FINISHED_ABORTED", ([1, 2],)),
        ("finished", "wait", "FINISHED_ABORTED", ([],)),
    ]


def test_unknown_ids_in_a_report_are_tolerated():
    driver = make_driver()
    driver.add(make_request("a", prompt_of(0, 20)))
    driver.step()
    report(driver, finished_sending={"ghost"}, finished_recving={"ghost", "a"})
    driver.run()
    assert "a" in driver.finished


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_failed_synchronous_load_is_recomputed_without_asking_again(async_scheduling):
    driver = make_driver(policy="recompute", async_scheduling=async_scheduling)
    prompt = prompt_of(0, 60)
    request = make_request("a", prompt)
    driver.connector.matches["a"] = [(48, False)]
    driver.add(request)
    output = driver.scheduler.schedule()
    blocks = driver.scheduler.kv_cache_manager.get_block_ids("a")[0]
    fill(driver, request, 48)
    driver.in_flight.append((output, driver.worker.execute(output)))
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
    output = driver.scheduler.schedule()
    fill(driver, request, 48)
    driver.in_flight.append((output, driver.worker.execute(output)))
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


def test_nobody_waits_for_a_request_whose_blocks_are_only_kept():
    driver = make_driver()
    driver.connector.finish["a"] = (True, None)
    dropped = []
    driver.scheduler.kv_cache_manager.drop_checkpoints = dropped.append
    request = make_request("a", prompt_of(0, 20), max_tokens=1)
    driver.add(request)
    driver.step()
    assert dropped == [request]
    report(driver, finished_sending={"a"})
    driver.run()


@pytest.mark.parametrize("when", ["loading", "received", "aborted", "failed"])
def test_new_weights_take_back_what_a_connector_brings(when):
    """It is of the old ones, so it is computed: after the load, which still writes the blocks. A
    block that fails to load then is nobody's loss."""
    driver = make_driver(policy="fail")
    prompt = prompt_of(0, 60)
    driver.add(make_request("first", prompt[:20], max_tokens=1))
    driver.run()
    request = make_request("a", prompt)
    driver.connector.matches["a"] = [(32, True), (0, False)]
    driver.add(request)
    driver.step()
    blocks = driver.scheduler.kv_cache_manager.get_block_ids("a")[0]
    if when == "received":
        report(driver, finished_recving={"a"})
    elif when == "aborted":
        driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    driver.worker.slots.clear()
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    if when != "received":
        assert driver.scheduler.kv_cache_manager.get_block_ids("a")[0] == blocks
        bad = {blocks[2]} if when == "failed" else set()
        report(driver, finished_recving={"a"}, invalid_block_ids=bad)
    driver.run()
    if when != "aborted":
        expect(driver, "a", prompt)
        assert driver.finished["a"].num_cached_tokens == 0
    assert driver.scheduler.kv_cache_manager.usage == 0
    driver.add(make_request("b", prompt))
    driver.run()
    expect(driver, "b", prompt)


def test_a_reset_that_leaves_loads_alone_leaves_their_source():
    driver = make_driver()
    asked = []
    driver.connector.reset_cache = lambda: asked.append(1)
    driver.connector.matches["a"] = [(48, True), (0, False)]
    driver.add(make_request("a", prompt_of(0, 60)))
    driver.step()
    assert driver.scheduler.reset_prefix_cache(reset_connector=True) is False and not asked
    assert driver.scheduler.reset_prefix_cache(True, True) is True and asked
    report(driver, finished_recving={"a"})
    driver.run()


def test_connector_reset_is_part_of_a_cache_reset():
    driver = make_driver()
    driver.connector.reset_cache = lambda: False
    assert driver.scheduler.reset_prefix_cache() is True
    assert driver.scheduler.reset_prefix_cache(reset_connector=True) is False


def test_ids_without_a_group_count_for_what_is_being_loaded():
    """Block ids repeat from group to group: another request's block of that number is fine."""
    driver = make_driver(policy="fail", async_scheduling=False)
    driver.add(make_request("other", prompt_of(1, 40), ignore_eos=True))
    driver.step()
    request = make_request("a", prompt_of(0, 60))
    driver.connector.matches["a"] = [(48, False)]
    driver.add(request)
    output = driver.scheduler.schedule()
    fill(driver, request, 48)
    driver.in_flight.append((output, driver.worker.execute(output)))
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
    output = driver.scheduler.schedule()
    bad = driver.scheduler.kv_cache_manager.get_block_ids("a")[0][:3]
    fill(driver, request, 48)
    driver.in_flight.append((output, driver.worker.execute(output)))
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
    output = driver.scheduler.schedule()
    bad = driver.scheduler.kv_cache_manager.get_block_ids("a")[0][1:3]
    fill(driver, request, 48)
    driver.in_flight.append((output, driver.worker.execute(output)))
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
    output = driver.scheduler.schedule()
    blocks = driver.scheduler.kv_cache_manager.get_block_ids("a")[0]
    fill(driver, request, 48)
    driver.in_flight.append((output, driver.worker.execute(output)))
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
    output = driver.scheduler.schedule()
    blocks = driver.scheduler.kv_cache_manager.get_block_ids("a")[0]
    fill(driver, request, 48)
    driver.in_flight.append((output, driver.worker.execute(output)))
    if how == "preempt":
        driver.scheduler._preempt_last()
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    other = make_request("b", prompt_of(1, 60))
    driver.add(other)
    output = driver.scheduler.schedule()
    assert driver.scheduler.kv_cache_manager.get_block_ids("b")[0] == blocks
    fill(driver, other, num_loaded)
    driver.in_flight.append((output, driver.worker.execute(output)))
    bad = set(blocks[:3])
    if with_group:
        report(driver, invalid_blocks={(0, block) for block in bad})
    else:
        report(driver, invalid_block_ids=bad)
    driver.run()
    expect(driver, "b", prompt_of(1, 60))


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_what_was_computed_after_a_load_is_not_cached_before_its_outcome_is_known(how):
    """Who shares the load's blocks gives its own back before it hears that the load failed."""
    driver = make_driver(policy="recompute", async_scheduling=True)
    prompt = prompt_of(0, 60)
    longer = [*prompt[:48], *prompt_of(1, 60)]
    request, other = make_request("a", prompt), make_request("b", longer)
    driver.connector.matches["a"] = [(48, False), (0, False)]
    driver.add(request)
    output = driver.scheduler.schedule()
    blocks = driver.scheduler.kv_cache_manager.get_block_ids("a")[0]
    fill(driver, request, 48)
    driver.in_flight.append((output, driver.worker.execute(output)))
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
    for report in (
        KVConnectorOutput(invalid_block_ids={5, 6}),
        KVConnectorOutput(invalid_blocks={(1, 5)}),
    ):
        failed = transfer.failed_blocks(report)
        assert failed == {(1, 5)}
        assert transfer.num_valid_tokens(requests["loads"], failed) == 0
        assert transfer.num_valid_tokens(requests["runs"], failed) is None


def test_statistics_of_several_steps_are_joined_until_they_are_sent():
    driver = make_driver(async_scheduling=False)
    driver.scheduler.log_stats = True
    driver.add(make_request("a", prompt_of(0, 20), max_tokens=20))
    driver.step()
    driver.scheduler._pack = lambda outputs, computed: {}
    for number in (1, 2):
        report(driver, kv_connector_stats=NumberStats({"number": number}))
    sent = driver.scheduler.make_stats().connector
    assert sent == {"number": 3} and driver.scheduler.make_stats().connector is None


def test_statistics_of_a_step_without_work_do_not_wait_for_the_next_request():
    driver = make_driver(async_scheduling=False)
    output = driver.scheduler.schedule()
    result = driver.worker.execute(output)
    result.kv_connector_output = KVConnectorOutput(kv_connector_stats=NumberStats({"number": 1}))
    [message] = driver.scheduler.update_from_output(output, result).values()
    assert message.scheduler_stats.connector == {"number": 1}
