# SPDX-License-Identifier: Apache-2.0
"""The scheduler and its KV connector: order of calls, loads, delayed frees."""

from __future__ import annotations

import pytest

from tests.distributed.kv_transfer.programmed_connector import NumberStats
from tests.v1.core.sched.connector_driver import (
    expect,
    fill,
    make_driver,
    prompt_of,
    report,
)
from tests.v1.core.sched.helpers import make_request
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus


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
