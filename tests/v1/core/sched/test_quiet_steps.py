# SPDX-License-Identifier: Apache-2.0
"""Steps that only decode take most requests as they are; nothing else may come out of that."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.core.sched.helpers import Driver, make_request, make_scheduler
from tests.v1.core.state_cases import full, kv_config, recurrent, window
from tests.v1.engine.fakes import EOS, expected_tokens
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus


def careful(scheduler):
    """The same scheduler, looking at every request in every step."""
    schedule_running = scheduler._schedule_running

    def look_at_all(step):
        for request in scheduler.running:
            request.quiet_until = 0
        return schedule_running(step)

    scheduler._schedule_running = look_at_all
    scheduler._take_plain = lambda results, special, verified, outputs: results
    return scheduler


def prompt_of(seed, length):
    return random.Random(seed).choices(range(20, 1000), k=length)


def decodes(driver):
    """The steps that ran nothing but decodes."""
    return [step for step in driver.worker.steps if step.decode_set_id]


def same(one: SchedulerOutput, other: SchedulerOutput) -> bool:
    return all(getattr(one, f.name) == getattr(other, f.name) for f in fields(SchedulerOutput))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(14, 60),
    budget=st.sampled_from([16, 24, 128]),
    async_scheduling=st.booleans(),
    kinds=st.sampled_from(["full", "full cached", "window", "hybrid"]),
    num_drafts=st.sampled_from([0, 0, 1, 4]),
)
def test_every_step_is_what_looking_at_each_request_gives(
    seed, num_pages, budget, async_scheduling, kinds, num_drafts
):
    specs = {"window": [full(), window(20)], "hybrid": [full(), recurrent()]}.get(kinds, [full()])
    config = kv_config(specs, num_pages, [1] * len(specs))
    options = {
        "max_model_len": 96,
        "max_num_batched_tokens": budget,
        "async_scheduling": async_scheduling,
        "caching": kinds == "full cached",
        "num_drafts": num_drafts,
    }
    plain = Driver(make_scheduler(config, **options))
    slow = Driver(careful(make_scheduler(config, **options)))
    rng = random.Random(seed)
    shared, wanted = prompt_of(seed, 40), {}
    for i in range(rng.randint(1, 8)):
        prompt = shared[: rng.choice([0, 20, 40])] + prompt_of(i, rng.randint(1, 20))
        stops = rng.choices(range(1000), k=9)
        options = {"max_tokens": rng.randint(1, 60), "stop_token_ids": stops}
        if rng.random() < 0.2:
            options["presence_penalty"] = 0.5  # takes no drafts
        wanted[f"r{i}"] = expected_tokens(prompt, SamplingParams(**options), 96, EOS)
        for driver in (plain, slow):
            driver.add(make_request(f"r{i}", prompt, **options))
        num_steps, aborts = rng.randint(0, 25), rng.random() < 0.1
        for driver in (plain, slow):
            if aborts:
                driver.scheduler.finish_requests(f"r{i // 2}", RequestStatus.FINISHED_ABORTED)
            for _ in range(num_steps):
                if driver.scheduler.has_requests():
                    driver.step()
    for driver in (plain, slow):
        driver.run()
    assert len(plain.worker.steps) == len(slow.worker.steps)
    for one, other in zip(plain.worker.steps, slow.worker.steps, strict=True):
        assert same(one, other)
    assert plain.tokens == slow.tokens
    for request_id, output in plain.finished.items():
        if output.finish_reason is not FinishReason.ABORT:
            assert plain.tokens[request_id] == wanted[request_id]
    assert {i: o.finish_reason for i, o in plain.finished.items()} == {
        i: o.finish_reason for i, o in slow.finished.items()
    }


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_blocks_are_asked_for_once_per_block(async_scheduling, monkeypatch):
    driver = Driver(make_scheduler(async_scheduling=async_scheduling))
    manager = driver.scheduler.kv_cache_manager
    calls = []
    allocate = manager.allocate_slots

    def counting(request, *args, **kwargs):
        calls.append(request.num_computed_tokens)
        return allocate(request, *args, **kwargs)

    monkeypatch.setattr(manager, "allocate_slots", counting)
    driver.add(make_request("a", prompt_of(0, 20), max_tokens=100, ignore_eos=True))
    driver.run()
    # The prompt, the first decode, then where a block is full: its hash is known and the next
    # block is needed (without a step in flight, the hash is known a token earlier).
    hashes = [31, 47, 63, 79, 95, 111]
    blocks = [32, 48, 64, 80, 96, 112]
    expected = blocks if async_scheduling else sorted(hashes + blocks)
    assert [n for n in calls if n > 20] == [n for n in expected if n < 119]


def test_steps_of_the_same_decodes_share_their_lists():
    driver = Driver(make_scheduler())
    for i in range(3):
        driver.add(make_request(f"r{i}", prompt_of(i, 9), max_tokens=9 + i, ignore_eos=True))
    driver.run()
    steps = decodes(driver)
    assert len(steps) == 10
    by_set = [[s for s in steps if s.decode_set_id == n] for n in (1, 2, 3)]
    assert [len(found) for found in by_set] == [8, 1, 1]
    first, last = by_set[0][0], by_set[0][-1]
    assert first.num_scheduled_tokens is last.num_scheduled_tokens
    assert first.sampling_req_ids is last.sampling_req_ids
    assert list(by_set[1][0].num_scheduled_tokens) == ["r1", "r2"]


def test_a_set_ends_with_any_other_step():
    driver = Driver(make_scheduler(max_num_seqs=2))
    driver.add(make_request("a", prompt_of(0, 9), max_tokens=30, ignore_eos=True))
    for _ in range(4):
        driver.step()
    driver.add(make_request("b", prompt_of(1, 9), max_tokens=1))
    for _ in range(40):
        driver.step()
    ids = [step.decode_set_id for step in driver.worker.steps if step.num_scheduled_tokens]
    assert ids == [0, 1, 1, 1, 0] + [2] * 25
    assert driver.reason("a") is FinishReason.LENGTH and len(driver.tokens["a"]) == 30


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_are_counted_as_computed_until_they_are_rejected(async_scheduling):
    driver = Driver(make_scheduler(num_drafts=3, async_scheduling=async_scheduling))
    scheduler, prompt = driver.scheduler, prompt_of(0, 9)
    request = make_request("a", prompt, max_tokens=40, ignore_eos=True, logprobs=0)
    driver.add(request)
    scheduled, stats = [], []
    while scheduler.has_requests():
        scheduled.append(driver.step().num_scheduled_tokens.get("a", 0))
        settled = request.num_computed_tokens - request.num_drafts_in_flight
        assert request.is_finished or settled < request.num_tokens + len(driver.in_flight)
        stats.append(scheduler.make_stats())
    driver.run()
    expected = SamplingParams(max_tokens=40, ignore_eos=True)
    assert driver.tokens["a"] == expected_tokens(prompt, expected)
    assert scheduled[0] == 9 and set(scheduled[1:-1]) <= {0, 1, 2, 3, 4} and 4 in scheduled
    assert len(scheduled) < 36
    assert request.num_output_placeholders == request.num_drafts_in_flight == 0


def test_accepted_drafts_are_counted_by_position():
    driver = Driver(make_scheduler(num_drafts=2))
    driver.add(make_request("a", prompt_of(0, 9), max_tokens=60, ignore_eos=True))
    drafts = verified = 0
    accepted, drafted = [0, 0], [0, 0]
    while driver.scheduler.has_requests():
        output = driver.scheduler.schedule()
        verified += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        packed = driver.scheduler.update_from_output(output, driver.worker.execute(output))
        for stats in (o.scheduler_stats for o in packed.values() if o.scheduler_stats):
            drafts += stats.num_draft_tokens
            for position, count in enumerate(stats.accepted_per_position):
                accepted[position] += count
            for position, count in enumerate(stats.drafted_per_position):
                drafted[position] += count
    assert drafts == verified == sum(drafted) > 0
    assert accepted[0] >= accepted[1] > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_past_the_end_were_not_accepted(async_scheduling):
    """The device knows some stop tokens only, so that a run of accepted drafts may go on after
    one."""
    prompt, counts = prompt_of(1, 9), []
    tokens = expected_tokens(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    for last in range(2, 20):
        driver = Driver(make_scheduler(num_drafts=5, async_scheduling=async_scheduling))
        request = make_request("a", prompt, max_tokens=40, stop_token_ids=[tokens[last]])
        driver.add(request)
        driver.run()
        assert driver.tokens["a"] == tokens[: last + 1]
        counts.append((request.num_accepted_drafts, request.num_verified_drafts))
        assert driver.finished["a"].num_drafts == request.draft_counts
    accepted, verified = ([both[i] for both in counts] for i in (0, 1))
    # One token more is at most one draft more, and of a run all tokens but the last are drafts.
    assert {b - a for a, b in itertools.pairwise(accepted)} == {0, 1}
    assert all(a <= last for last, a in enumerate(accepted, 2))
    assert sorted(set(verified)) == list(dict.fromkeys(verified)) and len(set(verified)) > 3


def test_a_stop_token_below_the_minimum_goes_on():
    prompt = prompt_of(2, 9)
    tokens = expected_tokens(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    driver = Driver(make_scheduler(async_scheduling=True))
    ends = {"stop_token_ids": [tokens[3], tokens[6]], "min_tokens": 6, "max_tokens": 12}
    driver.add(make_request("a", prompt, ignore_eos=True, **ends))
    driver.run()
    assert driver.tokens["a"] == tokens[:7]
    assert driver.finished["a"].stop_reason == tokens[6]


@pytest.mark.parametrize(("ignore_eos", "stops"), [(False, []), (True, [EOS]), (False, [EOS])])
def test_the_end_token_has_no_reason_unless_it_was_asked_for(ignore_eos, stops):
    prompt = next(
        p
        for p in (prompt_of(i, 8) for i in range(10**6))
        if EOS in expected_tokens(p, SamplingParams(max_tokens=6, ignore_eos=True))[1:]
    )
    driver = Driver(make_scheduler())
    driver.add(make_request("a", prompt, max_tokens=9, ignore_eos=ignore_eos, stop_token_ids=stops))
    driver.run()
    assert driver.tokens["a"][-1] == EOS and len(driver.tokens["a"]) < 9
    assert driver.finished["a"].stop_reason == (EOS if ignore_eos else None)


def test_what_is_measured_or_failed_does_not_pass_as_plain():
    driver = Driver(make_scheduler())
    measured = {"max_tokens": 6, "ignore_eos": True, "logprobs": 1}
    driver.add(make_request("measured", prompt_of(0, 9), **measured))
    driver.add(make_request("bad", prompt_of(1, 9), max_tokens=6, ignore_eos=True))
    driver.add(make_request("plain", prompt_of(2, 9), max_tokens=6, ignore_eos=True))
    for _ in range(3):
        driver.step()
    output = driver.scheduler.schedule()
    result = driver.worker.execute(output)
    result.failed_req_ids["bad"] = "a row is missing"
    driver.in_flight.append((output, result))
    outputs = {o.request_id: o for o in driver.collect()}
    assert output.decode_set_id and len(outputs) == 3
    assert outputs["measured"].new_logprobs is not None and outputs["plain"].new_logprobs is None
    assert (outputs["bad"].error, outputs["bad"].new_token_ids) == ("a row is missing", [])
    driver.run()
    assert [len(driver.tokens[r]) for r in ("measured", "bad", "plain")] == [6, 3, 6]


def test_tokens_from_before_a_step_back_are_dropped():
    """As after a load that failed: what is in flight is sampled again."""
    driver = Driver(make_scheduler(async_scheduling=True))
    scheduler, prompt = driver.scheduler, prompt_of(0, 20)
    request = make_request("a", prompt, max_tokens=12, ignore_eos=True)
    driver.add(request)
    for _ in range(6):
        driver.step()
    assert request.num_output_placeholders == 1
    scheduler.kv_cache_manager.forget_after(request, 16)
    scheduler._drop_in_flight_tokens(request)
    scheduler._rewound.add("a")
    request.num_computed_tokens, request.quiet_until = 16, 0
    driver.run()
    expected = SamplingParams(max_tokens=12, ignore_eos=True)
    assert driver.tokens["a"] == expected_tokens(prompt, expected)


def test_drafts_are_counted_in_every_step():
    scheduler = make_scheduler()
    scheduler.counts_drafts = True
    driver = Driver(scheduler)
    driver.add(make_request("a", prompt_of(0, 9), max_tokens=12, ignore_eos=True))
    drafts = 0
    while scheduler.has_requests():
        output = scheduler.schedule()
        packed = scheduler.update_from_output(output, driver.worker.execute(output))
        drafts += sum(o.scheduler_stats.num_drafts for o in packed.values() if o.scheduler_stats)
    assert drafts == 11


@pytest.mark.parametrize("beside", ["nothing", "a long prompt"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_state_at_the_end_continues_the_conversation(async_scheduling, beside):
    """Quiet steps move the state as well: a checkpoint at the wrong count would be wrong state."""
    config = kv_config([full(), recurrent()], 90, [1, 1])
    options = {"async_scheduling": async_scheduling, "max_num_batched_tokens": 24}
    driver = Driver(make_scheduler(config, **options))
    scheduler, prompt = driver.scheduler, prompt_of(0, 20)
    driver.add(make_request("a", prompt, max_tokens=36, ignore_eos=True))
    for _ in range(20):
        driver.step()
    if beside != "nothing":
        driver.add(make_request("long", prompt_of(1, 480), max_tokens=500, ignore_eos=True))
    while "a" not in driver.finished:
        driver.step()
    counts = [step.num_scheduled_tokens for step in driver.worker.steps]
    last = next(count for count in reversed(counts) if "a" in count)
    assert last == ({"a": 1} if beside == "nothing" else {"a": 1, "long": 23})
    again = make_request("b", [*prompt, *driver.tokens["a"], 5])
    scheduler.kv_cache_manager.begin_step()
    assert scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 20 + 36 - 1


def test_a_state_past_a_stop_string_is_not_kept():
    config = kv_config([full(), recurrent()], 60, [1, 1])
    driver = Driver(make_scheduler(config))
    scheduler, prompt = driver.scheduler, prompt_of(0, 20)
    request = make_request("a", prompt, max_tokens=60, ignore_eos=True)
    driver.add(request)
    while request.num_output_tokens < 20:
        driver.step()
    scheduler.stop_request("a", 12)
    again = make_request("b", [*prompt, *driver.tokens["a"]])
    scheduler.kv_cache_manager.begin_step()
    assert scheduler.kv_cache_manager.get_computed_blocks(again)[1] == 19, "the prompt's checkpoint"


@pytest.mark.parametrize(("caching", "steps"), [(True, [19, 1]), (False, [20])])
def test_a_prompt_is_cut_only_for_a_checkpoint(caching, steps):
    config = kv_config([full(), recurrent()], 60, [1, 1])
    driver = Driver(make_scheduler(config, caching=caching))
    driver.add(make_request("a", prompt_of(0, 20), max_tokens=1))
    driver.run()
    assert [s.num_scheduled_tokens["a"] for s in driver.worker.steps if s.num_scheduled_tokens] == (
        steps
    )
