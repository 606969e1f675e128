# SPDX-License-Identifier: Apache-2.0
"""Random traffic: whatever is scheduled, preempted or aborted, every output is the model's."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.core.sched.helpers import Driver, make_request, make_scheduler
from tests.v1.core.state_cases import full, kv_config, recurrent
from tests.v1.engine.fakes import EOS, expected_tokens
from vllm.cache_options import CacheOptions
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

MAX_LEN = 128
HYBRID = [full(), recurrent()]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(9, 30),
    budget=st.sampled_from([16, 24, 64, 128]),
    policy=st.sampled_from(["fcfs", "priority"]),
    async_scheduling=st.booleans(),
    caching=st.booleans(),
    threshold=st.sampled_from([0, 7]),
    max_num_seqs=st.integers(1, 12),
    watermark=st.sampled_from([0.0, 0.2]),
    hybrid=st.booleans(),
)
def test_traffic(seed, async_scheduling, hybrid, **options):
    rng = random.Random(seed)
    state_memory = kv_config(HYBRID, options["num_blocks"] + 2, [1, 1]) if hybrid else None
    options["long_prefill_token_threshold"] = options.pop("threshold")
    options["max_num_batched_tokens"] = options.pop("budget")
    driver = Driver(
        make_scheduler(
            state_memory, max_model_len=MAX_LEN, async_scheduling=async_scheduling, **options
        )
    )
    driver.worker.state_group = 1 if hybrid else None
    shared = rng.choices(range(20, 1000), k=64)
    requests, aborted = {}, set()
    for i in range(rng.randint(1, 14)):
        own = rng.choices(range(9, 1000), k=rng.randint(1, 50))
        prompt = shared[: rng.choice([0, 16, 33, 64])] + own
        request = make_request(
            f"r{i}",
            prompt,
            priority=rng.randint(0, 2),
            arrival=float(i),
            max_tokens=rng.randint(1, 90),
            min_tokens=0,
            stop_token_ids=rng.choices(range(1000), k=15),
        )
        request.cache = CacheOptions(checkpoints=tuple(rng.choices(range(1, 80), k=2)))
        requests[request.request_id] = request
        driver.add(request)
        for _ in range(rng.randint(0, 6)):
            if len(driver.in_flight) >= driver.scheduler.max_steps_in_flight:
                driver.collect()
            elif driver.scheduler.has_requests():
                driver.launch()
        live = [r for r in requests if r not in driver.finished and r not in aborted]
        if live and rng.random() < 0.2:
            victim = rng.choice(live)
            aborted.add(victim)
            driver.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.1:
            driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    for request_id, request in requests.items():
        expected = expected_tokens(request.prompt_token_ids, request.sampling_params, MAX_LEN, EOS)
        received = driver.tokens.get(request_id, [])
        if request_id in aborted:
            assert received == expected[: len(received)] and request_id not in driver.finished
        else:
            assert received == expected
            assert driver.reason(request_id) in (FinishReason.STOP, FinishReason.LENGTH)
    scheduler = driver.scheduler
    assert not scheduler.requests and not scheduler.running and not scheduler.waiting
    assert scheduler.kv_cache_manager.usage == 0 and not driver.worker.requests
    for step in driver.worker.steps:
        assert step.total_num_scheduled_tokens <= options["max_num_batched_tokens"]
        assert len(step.num_scheduled_tokens) <= options["max_num_seqs"]
