# SPDX-License-Identifier: Apache-2.0
"""Batching, budgets, stops and preemption of the scheduler."""

from __future__ import annotations

import random

import pytest

from tests.v1.core.sched.helpers import Driver, make_kv_cache_config, make_request, make_scheduler
from tests.v1.core.state_cases import full, kv_config, recurrent
from tests.v1.engine.fakes import EOS, expected_tokens, make_vllm_config, next_token
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(20, 1000), k=length)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 32},
        {"long_prefill_token_threshold": 10},
        {"num_blocks": 36},
        {"num_blocks": 36, "policy": "priority"},
        {"enable_chunked_prefill": False},
        {"num_blocks": 36, "caching": False},
        {"max_num_seqs": 2},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_output_is_the_same_under_every_schedule(async_scheduling, options):
    driver = Driver(make_scheduler(async_scheduling=async_scheduling, **options))
    shared = prompt_of(0, 48)
    rng = random.Random(1)
    requests = {}
    for i in range(12):
        prompt = shared[: rng.choice([0, 17, 48])] + prompt_of(i, rng.randint(1, 70))
        max_tokens = rng.randint(1, 60)
        requests[f"r{i}"] = (prompt, max_tokens)
        request = make_request(
            f"r{i}", prompt, priority=i % 3, arrival=float(i), max_tokens=max_tokens
        )
        driver.add(request)
        for _ in range(rng.randint(0, 3)):
            driver.step()
    driver.run()
    for request_id, (prompt, max_tokens) in requests.items():
        params = SamplingParams(max_tokens=max_tokens)
        assert driver.tokens[request_id] == expected_tokens(prompt, params, eos=EOS)
    if options.get("num_blocks") == 36 and "caching" in options:
        assert any(step.preempted_req_ids for step in driver.worker.steps)
    assert driver.scheduler.requests == {}
    assert driver.scheduler.kv_cache_manager.usage == 0
    assert driver.worker.requests == {}


def test_new_requests_join_running_ones_within_the_budget():
    driver = Driver(make_scheduler(max_num_batched_tokens=32))
    driver.add(make_request("a", prompt_of(0, 20)), make_request("b", prompt_of(1, 20)))
    first = driver.step()
    assert first.num_scheduled_tokens == {"a": 20, "b": 12}
    assert first.sampling_req_ids == {"a"}
    second = driver.step()
    assert second.num_scheduled_tokens == {"a": 1, "b": 8}
    assert second.sampling_req_ids == {"a", "b"}
    assert [r.req_id for r in first.scheduled_new_reqs] == ["a", "b"]
    assert second.scheduled_new_reqs == []
    assert second.scheduled_cached_reqs.num_computed_tokens == [20, 12]


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step():
    driver = Driver(
        make_scheduler(max_model_len=64, max_num_batched_tokens=64, enable_chunked_prefill=False)
    )
    driver.add(make_request("a", prompt_of(0, 40)), make_request("b", prompt_of(1, 40)))
    assert driver.step().num_scheduled_tokens == {"a": 40}
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 40}
    driver.run()
    assert set(driver.finished) == {"a", "b"}


def test_max_num_seqs_and_fcfs_order():
    driver = Driver(make_scheduler(max_num_seqs=2))
    driver.add(*(make_request(f"r{i}", prompt_of(i, 5), max_tokens=2) for i in range(4)))
    assert list(driver.step().num_scheduled_tokens) == ["r0", "r1"]
    driver.step()
    assert list(driver.step().num_scheduled_tokens) == ["r2", "r3"]


def test_priority_order_and_victim():
    driver = Driver(make_scheduler(policy="priority", num_blocks=8, max_model_len=100))
    low = make_request("low", prompt_of(0, 40), priority=5, arrival=0, max_tokens=50)
    high = make_request("high", prompt_of(1, 40), priority=0, arrival=1, max_tokens=50)
    driver.add(low)
    driver.step()
    driver.add(high)
    preempted = set()
    for _ in range(30):
        preempted |= driver.step().preempted_req_ids
    assert preempted == {"low"}
    assert low.status is RequestStatus.PREEMPTED and high.status is RequestStatus.RUNNING
    driver.run()
    assert low.num_preemptions >= 1
    assert driver.tokens["low"] == expected_tokens(
        low.prompt_token_ids, SamplingParams(max_tokens=50), 100, EOS
    )


def test_preempted_request_comes_back_with_all_tokens_and_blocks():
    driver = Driver(make_scheduler(num_blocks=8, max_model_len=100, caching=False))
    driver.add(make_request("a", prompt_of(0, 40), max_tokens=50, ignore_eos=True))
    driver.add(make_request("b", prompt_of(1, 40), max_tokens=50, ignore_eos=True))
    driver.run()
    resumed = [s for s in driver.worker.steps if s.scheduled_cached_reqs.resumed_req_ids]
    assert resumed and all(s.scheduled_cached_reqs.resumed_req_ids == {"b"} for s in resumed)
    cached = resumed[0].scheduled_cached_reqs
    tokens = cached.all_token_ids["b"]
    index = cached.req_ids.index("b")
    assert tokens[:40] == prompt_of(1, 40) and len(tokens) > 40
    assert cached.num_computed_tokens[index] == 0
    assert len(cached.new_block_ids[index][0]) == -(-len(tokens) // 16)
    assert [s for s in driver.worker.steps if "b" in {r.req_id for r in s.scheduled_new_reqs}] == [
        driver.worker.steps[0]
    ]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_stops(async_scheduling):
    prompt = prompt_of(3, 10)
    first, second, third = expected_tokens(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    cases = {
        "length": ({"max_tokens": 2}, [first, second], FinishReason.LENGTH, None),
        "token": ({"stop_token_ids": [second]}, [first, second], FinishReason.STOP, second),
        "min": (
            {"stop_token_ids": [second, third], "min_tokens": 3},
            [first, second, third],
            FinishReason.STOP,
            third,
        ),
    }
    for name, (params, tokens, reason, stop_reason) in cases.items():
        driver = Driver(make_scheduler(async_scheduling=async_scheduling))
        driver.add(make_request(name, prompt, ignore_eos=True, **params))
        driver.run()
        assert driver.tokens[name] == tokens
        assert driver.finished[name].finish_reason is reason
        assert driver.finished[name].stop_reason == stop_reason


def test_eos_has_no_stop_reason_and_can_be_ignored():
    prompt = next(p for p in (prompt_of(i, 6) for i in range(100000)) if next_token(p) == EOS)
    driver = Driver(make_scheduler())
    driver.add(make_request("eos", prompt), make_request("ignored", prompt, ignore_eos=True))
    driver.run()
    assert driver.tokens["eos"] == [EOS] and driver.reason("eos") is FinishReason.STOP
    assert driver.finished["eos"].stop_reason is None
    assert len(driver.tokens["ignored"]) == 8


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_nothing_is_scheduled_past_the_limits(async_scheduling):
    driver = Driver(make_scheduler(max_model_len=32, async_scheduling=async_scheduling))
    driver.add(make_request("len", prompt_of(0, 30), max_tokens=20, ignore_eos=True))
    driver.add(make_request("max", prompt_of(1, 5), max_tokens=3, ignore_eos=True))
    driver.run()
    computed = {"len": 0, "max": 0}
    for step in driver.worker.steps:
        for request_id, count in step.num_scheduled_tokens.items():
            computed[request_id] += count
    assert len(driver.tokens["len"]) == 2 and driver.reason("len") is FinishReason.LENGTH
    assert computed == {"len": 31, "max": 7}


def test_async_runs_one_step_ahead_and_drops_the_token_after_a_stop():
    prompt = prompt_of(3, 10)
    tokens = expected_tokens(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    driver = Driver(make_scheduler(async_scheduling=True))
    request = make_request("a", prompt, ignore_eos=True, stop_token_ids=[tokens[1]])
    driver.add(request)
    driver.launch()
    ahead = driver.launch()
    assert ahead.num_scheduled_tokens == {"a": 1}
    assert ahead.scheduled_cached_reqs.num_output_tokens == [1]
    assert request.num_output_placeholders == 2
    with pytest.raises(RuntimeError, match="in flight"):
        driver.scheduler.schedule()
    driver.run()
    assert driver.tokens["a"] == tokens[:2]


def test_abort_waiting_running_and_in_flight():
    driver = Driver(make_scheduler(async_scheduling=True, max_num_seqs=1))
    driver.add(make_request("run", prompt_of(0, 20)), make_request("wait", prompt_of(1, 20)))
    driver.launch()
    driver.scheduler.finish_requests(["wait", "unknown", "wait"], RequestStatus.FINISHED_ABORTED)
    driver.scheduler.finish_requests("run", RequestStatus.FINISHED_ABORTED)
    assert not driver.scheduler.has_unfinished_requests()
    assert driver.collect() == []
    assert driver.launch().finished_req_ids == {"run", "wait"}
    driver.run()
    assert driver.finished == {} and driver.scheduler.kv_cache_manager.usage == 0


def test_reused_id_does_not_receive_the_old_requests_token():
    driver = Driver(make_scheduler(async_scheduling=True))
    driver.add(make_request("x", prompt_of(0, 20)))
    driver.launch()
    driver.launch()
    driver.scheduler.finish_requests("x", RequestStatus.FINISHED_ABORTED)
    other = prompt_of(1, 25)
    driver.add(make_request("x", other))
    driver.run()
    assert driver.tokens["x"] == expected_tokens(other, SamplingParams(max_tokens=8), eos=EOS)


def test_duplicate_id_is_refused():
    driver = Driver(make_scheduler())
    driver.add(make_request("x", [1, 2]))
    with pytest.raises(ValueError, match="still in use"):
        driver.add(make_request("x", [1, 2]))


def test_worker_failure_ends_only_that_request():
    driver = Driver(make_scheduler())
    driver.add(make_request("bad", prompt_of(0, 5)), make_request("good", prompt_of(1, 5)))
    output = driver.scheduler.schedule()
    result = driver.worker.execute(output)
    result.failed_req_ids["bad"] = "rows are missing"
    driver.in_flight.append((output, result))
    (bad, good) = driver.collect()
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "rows are missing")
    assert bad.new_token_ids == [] and good.finish_reason is None
    driver.run()
    assert len(driver.tokens["good"]) == 8


@pytest.mark.parametrize("chunk", [64, 512])
def test_request_that_can_never_fit_ends_with_an_error(chunk):
    too_small = make_kv_cache_config(make_vllm_config(max_model_len=128, num_blocks=10))
    driver = Driver(make_scheduler(too_small, max_num_batched_tokens=chunk))
    scheduler = driver.scheduler
    driver.add(make_request("held", prompt_of(9, 200), max_tokens=500))
    driver.run()
    assert driver.reason("held") is FinishReason.ERROR
    assert "does not fit" in driver.finished["held"].error
    assert scheduler.requests == {} and scheduler.kv_cache_manager.usage == 0


def test_request_that_needs_all_memory_starts_over_if_its_pages_are_shared(caplog):
    """The third request fits, alone, into the pages that its blocks need. It began while there were
    others, whose cached blocks fill what its pages have left, where no other group can use it."""
    memory = kv_config([full(), full(head_size=128), recurrent()], 8, [10, 5, 2])
    options = {"max_model_len": 256, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    driver, requests = Driver(make_scheduler(memory, policy="priority", **options)), []
    sizes = [(1, 200, 42, 5, 40), (1, 200, 25, 5, 3), (0, 200, 34, 30, 2), (0, 160, 46, 2, 0)]
    for i, (seed, shared, own, count, num_steps) in enumerate([*sizes, (0, 100, 21, 60, 0)]):
        prompt, fields = prompt_of(seed, shared) + prompt_of(i + 10, own), {"max_tokens": count}
        requests.append(make_request(f"r{i}", prompt, arrival=i, ignore_eos=True, **fields))
        driver.add(requests[-1])
        for _ in range(num_steps):
            driver.step()
    scheduler = driver.scheduler
    while scheduler.has_requests() and "r2 starts over" not in caplog.text:
        driver.step()
    # This one would come first; but r2 had had its turn, and lets no one in before its end.
    requests.append(make_request("late", prompt_of(9, 20), priority=-1))
    driver.add(requests[-1])
    while not requests[2].is_finished:
        assert set(driver.step().num_scheduled_tokens) == {"r2"}
    driver.run()
    for one in requests:
        assert driver.finished[one.request_id].error is None
        wanted = expected_tokens(one.prompt_token_ids, one.sampling_params, 256)
        assert driver.tokens[one.request_id] == wanted
    assert scheduler.kv_cache_manager.usage == 0


def test_results_must_come_back_in_order():
    scheduler = make_scheduler(async_scheduling=True)
    scheduler.add_request(make_request("a", [1, 2, 3]))
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(RuntimeError, match="order"):
        scheduler.update_from_output(second, ModelRunnerOutput(["a"], [[5]]))


def test_prefix_hit_is_counted_and_reported():
    driver = Driver(make_scheduler())
    prompt = prompt_of(0, 50)
    driver.add(make_request("first", prompt))
    driver.run()
    driver.add(make_request("second", prompt))
    output = driver.step()
    assert output.num_scheduled_tokens == {"second": 2}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 48
    driver.run()
    assert driver.finished["second"].num_cached_tokens == 48
    assert driver.finished["first"].num_cached_tokens == 0


def test_reset_prefix_cache_with_running_requests():
    driver = Driver(make_scheduler(async_scheduling=True))
    prompt = prompt_of(0, 50)
    driver.add(make_request("a", prompt, max_tokens=20))
    driver.launch()
    driver.launch()
    assert not driver.scheduler.reset_prefix_cache()
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    assert driver.tokens["a"] == expected_tokens(prompt, SamplingParams(max_tokens=20), eos=EOS)


class Uncompiled:
    """The grammar of a request that has to wait for it."""

    ready = False


def test_requests_that_wait_for_a_grammar_are_counted_apart():
    driver = Driver(make_scheduler(max_num_seqs=1))
    held, runs, waits = (make_request(name, prompt_of(i, 9)) for i, name in enumerate("abc"))
    held.grammar = Uncompiled()
    driver.add(held, runs, waits)
    output = driver.scheduler.schedule()
    packed = driver.scheduler.update_from_output(output, driver.worker.execute(output))
    stats = packed[0].scheduler_stats
    assert (stats.num_running, stats.num_waiting, stats.num_deferred) == (1, 2, 1)


def test_stats():
    driver = Driver(make_scheduler())
    driver.add(make_request("a", prompt_of(0, 50)), make_request("b", prompt_of(1, 10)))
    output = driver.scheduler.schedule()
    packed = driver.scheduler.update_from_output(output, driver.worker.execute(output))
    stats = packed[0].scheduler_stats
    assert (stats.num_running, stats.num_waiting, stats.prefix_queries) == (2, 0, 60)
    assert 0 < stats.kv_cache_usage < 0.1
    queued, scheduled = packed[0].outputs[0].times
    assert 0 < queued <= scheduled <= packed[0].timestamp
