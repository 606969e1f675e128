# SPDX-License-Identifier: Apache-2.0
"""Ending a request at a stop string, which only the front end can see."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.v1.core.sched.helpers import Driver, make_request, make_scheduler
from tests.v1.engine.fakes import EOS, expected_tokens
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(20, 1000), k=length)


def run_until(driver: Driver, request: Request, num_tokens: int) -> None:
    while request.num_output_tokens < num_tokens:
        driver.step()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_later_tokens_are_forgotten(async_scheduling: bool) -> None:
    driver = Driver(make_scheduler(async_scheduling=async_scheduling))
    request = make_request("a", prompt_of(20), max_tokens=40, ignore_eos=True)
    driver.add(request)
    run_until(driver, request, 20)
    driver.scheduler.stop_request("a", 10)
    driver.run()
    assert driver.reason("a") is FinishReason.STOP
    assert request.num_output_tokens == 10 and request.all_token_ids[:20] == prompt_of(20)
    assert len(request.block_hashes) <= 30 // 16
    assert driver.scheduler.kv_cache_manager.usage == 0 and not driver.scheduler.requests


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_preempted_request_is_computed_again_up_to_the_stop(async_scheduling: bool) -> None:
    driver = Driver(make_scheduler(async_scheduling=async_scheduling))
    request = make_request("a", prompt_of(20), max_tokens=40, ignore_eos=True)
    driver.add(request)
    run_until(driver, request, 12)
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.scheduler.stop_request("a", 10)
    driver.run()
    params: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
    assert request.output_token_ids == expected_tokens(
        prompt_of(20), SamplingParams(**params), eos=EOS
    )
    assert request.num_computed_tokens >= 29
    assert driver.reason("a") is FinishReason.LENGTH


def test_unknown_and_finished_requests_are_ignored() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_request("a", prompt_of(5), max_tokens=2, ignore_eos=True))
    driver.run()
    driver.scheduler.stop_request("a", 1)
    driver.scheduler.stop_request("b", 1)
    assert driver.reason("a") is FinishReason.LENGTH and not driver.scheduler.has_requests()


def connected(**options: Any) -> Driver:
    """A scheduler with a connector, which keeps the blocks of `a`."""
    config = KVTransferConfig(
        kv_connector="AllGroupsConnector",
        kv_connector_module_path="tests.v1.core.sched.fake_connector",
        kv_role="kv_both",
    )
    driver = Driver(make_scheduler(kv_transfer_config=config, **options))
    driver.scheduler.connector.finish["a"] = (True, {"path": "x"})
    return driver


def finished_calls(driver: Driver) -> list[str]:
    return [call[2] for call in driver.scheduler.connector.calls if call[0] == "finished"]


def run_to_own_end(driver: Driver, **params: Any) -> Request:
    request = make_request("a", prompt_of(20), stop=["x"], ignore_eos=True, **params)
    driver.add(request)
    while "a" not in driver.scheduler.awaiting_stop:
        driver.step()
    return request


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize(("num_tokens", "status"), [(3, "STOPPED"), (4, "LENGTH_CAPPED")])
def test_own_end_waits_for_the_front_end(
    async_scheduling: bool, num_tokens: int, status: str
) -> None:
    """The request's own end and an earlier stop string cross on their way."""
    driver = connected(async_scheduling=async_scheduling)
    request = run_to_own_end(driver, max_tokens=4)
    assert finished_calls(driver) == [] and "a" not in driver.finished
    driver.scheduler.stop_request("a", num_tokens)
    driver.scheduler.stop_request("a", num_tokens)
    assert finished_calls(driver) == [f"FINISHED_{status}"]
    assert request.num_output_tokens == num_tokens
    while "a" not in driver.finished:
        driver.step()
    assert driver.finished["a"].kv_transfer_params == {"path": "x"}
    assert driver.scheduler.transfer.sending == {"a"}


def test_abort_while_the_front_end_is_asked() -> None:
    driver = connected()
    run_to_own_end(driver, max_tokens=2)
    driver.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert finished_calls(driver) == ["FINISHED_ABORTED"]
    driver.scheduler.stop_request("a", 2)
    assert len(finished_calls(driver)) == 1


def test_workers_have_a_row_for_whom_the_front_end_is_asked() -> None:
    driver = connected(max_num_seqs=1, async_scheduling=False)
    run_to_own_end(driver, max_tokens=2)
    driver.add(make_request("b", prompt_of(9), max_tokens=2))
    assert not driver.step().num_scheduled_tokens
    driver.scheduler.stop_request("a", 1)
    assert list(driver.step().num_scheduled_tokens) == ["b"]


def test_stop_while_a_preempted_request_is_computed_again() -> None:
    """It runs again, but the rows up to the stop are not all there yet."""
    driver = connected(async_scheduling=False, max_num_batched_tokens=16)
    request = make_request("a", prompt_of(20), max_tokens=40, stop=["x"], ignore_eos=True)
    driver.add(request)
    run_until(driver, request, 12)
    driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.step()
    assert request.status is RequestStatus.RUNNING and request.num_computed_tokens == 16
    driver.scheduler.stop_request("a", 10)
    while not finished_calls(driver):
        driver.step()
    assert request.num_computed_tokens >= 29 and request.num_output_tokens == 10


@pytest.mark.parametrize("num_loaded", [16, 31])
def test_stop_while_a_preempted_request_is_loaded(num_loaded: int) -> None:
    """What the connector is bringing back is not there yet, and may be more than the reply has."""
    driver = connected(async_scheduling=False)
    request = make_request("a", prompt_of(20), max_tokens=40, stop=["x"], ignore_eos=True)
    driver.add(request)
    run_until(driver, request, 12)
    driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.scheduler.connector.matches["a"] = [(num_loaded, True), (0, False)]
    driver.step()
    assert driver.scheduler.transfer.loading == {"a"}
    driver.scheduler.stop_request("a", 8)
    assert not finished_calls(driver)
    driver.launch()
    driver.in_flight[0][1].kv_connector_output = KVConnectorOutput(finished_recving={"a"})
    driver.collect()
    while not finished_calls(driver):
        driver.step()
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert request.output_token_ids == expected_tokens(prompt_of(20), params)
    assert 27 <= request.num_computed_tokens == request.num_state_tokens
