# SPDX-License-Identifier: Apache-2.0
"""Requests take turns in the stages of a pipeline."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.v1.core.sched.helpers import Driver, make_request, make_scheduler
from vllm.v1.core.sched.output import SchedulerOutput


def make_driver(num_stages: int, **options: Any) -> Driver:
    return Driver(make_scheduler(num_stages=num_stages, **options))


def decode_steps(driver: Driver, count: int) -> list[SchedulerOutput]:
    return [driver.step() for _ in range(count)]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_work_on_other_requests(num_stages: int, async_scheduling: bool) -> None:
    driver = make_driver(num_stages, async_scheduling=async_scheduling)
    assert driver.scheduler.max_steps_in_flight == num_stages + async_scheduling
    driver.add(*(make_request(f"r{i}", [i] * 5, max_tokens=40) for i in range(2 * num_stages)))
    decode_steps(driver, num_stages)
    steps = decode_steps(driver, 5 * num_stages)
    for i in range(len(steps)):
        together = [req for step in steps[i : i + num_stages] for req in step.num_scheduled_tokens]
        assert len(together) == len(set(together))
        assert len(steps[i].num_scheduled_tokens) == 2
    # Steps of the same requests are a set, whose lists the workers know.
    assert len({step.decode_set_id for step in steps}) == num_stages
    driver.run()
    assert all(len(tokens) == 40 for tokens in driver.tokens.values())


def test_a_prompt_goes_through_the_stages_piece_by_piece() -> None:
    driver = make_driver(2, max_num_batched_tokens=16)
    driver.add(make_request("long", list(range(64)), max_tokens=2))
    assert [driver.step().num_scheduled_tokens for _ in range(4)] == [{"long": 16}] * 4
    driver.run()
    assert len(driver.tokens["long"]) == 2


def test_decodes_do_not_wait_for_a_prompt() -> None:
    driver = make_driver(2, max_num_batched_tokens=16)
    driver.add(*(make_request(f"r{i}", [i], max_tokens=60) for i in range(4)))
    decode_steps(driver, 6)
    driver.add(make_request("long", list(range(100)), max_tokens=2))
    steps = decode_steps(driver, 8)
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        both = {*first.num_scheduled_tokens, *second.num_scheduled_tokens}
        assert both == {"r0", "r1", "r2", "r3", "long"}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(2, 4),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(0, 1000),
)
def test_everybody_is_served_and_nobody_too_soon(
    num_stages: int, async_scheduling: bool, sizes: list[tuple[int, int]], seed: int
) -> None:
    """Requests come at any time, are preempted, and none samples twice in `num_stages` steps."""
    rng = random.Random(seed)
    driver = make_driver(num_stages, async_scheduling=async_scheduling, max_num_batched_tokens=32)
    coming = [
        make_request(f"r{i}", [i] * length, max_tokens=tokens, ignore_eos=True)
        for i, (length, tokens) in enumerate(sizes)
    ]
    total = {request.request_id: request.max_tokens for request in coming}
    last: dict[str, int] = {}
    for _ in range(3000):
        if coming and rng.random() < 0.5:
            driver.add(coming.pop())
            continue
        if not coming and not driver.scheduler.has_requests():
            break
        if driver.scheduler.running and rng.random() < 0.02:
            driver.scheduler._preempt_last()
        if len(driver.in_flight) >= driver.scheduler.max_steps_in_flight or rng.random() < 0.2:
            if driver.in_flight:
                driver.collect()
            continue
        step = driver.launch()
        number = driver.scheduler._step
        # Of a request that comes back the host knows, and tells, every token.
        told = step.scheduled_cached_reqs.resumed_req_ids
        for req_id in step.sampling_req_ids:
            assert req_id in told or number - last.get(req_id, -100) >= num_stages
            last[req_id] = number
    driver.run()
    assert {req_id: len(tokens) for req_id, tokens in driver.tokens.items()} == total
