# SPDX-License-Identifier: Apache-2.0
"""Ending a request at a stop string, which only the front end can see."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.v1.core.sched.helpers import Driver, make_request, make_scheduler
from tests.v1.engine.fakes import EOS, expected_tokens
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request


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
