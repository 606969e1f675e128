# SPDX-License-Identifier: Apache-2.0
"""The engine core with a model that samples from the masks it gets.

Every constrained request must produce exactly the tokens it produces alone, whatever is scheduled,
split, preempted, stopped or aborted around it: one wrong or late mask changes them.
"""

from __future__ import annotations

import pickle
import random
import zlib
from concurrent.futures import CancelledError, Future
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.engine import fakes
from tests.v1.engine.fakes import (
    EOS,
    REJECTED,
    VOCAB_SIZE,
    FakeExecutor,
    FakeWorker,
    make_vllm_config,
)
from tests.v1.structured_output.vocabularies import (
    choose,
    done,
    expected_tokens,
    prepared,
    request_grammar,
    text_of,
    tokens_of,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest, FinishReason, StopRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output.masks import ReceiveMasks

MAX_LEN = 128
CONSTRAINTS = [
    StructuredOutputsParams(regex="[a-c]{4,40}-[01]+"),
    StructuredOutputsParams(choice=["abc", "a" * 30, "bad cafe"]),
    StructuredOutputsParams(json={"type": "array", "items": {"enum": ["a", "bc", 0, 1]}}),
    StructuredOutputsParams(grammar='root ::= "(" root ")" | "ab"'),
]


class MaskedWorker(FakeWorker):
    """Samples constrained requests from their masks, others as before.

    What it proposes for them is the text that `texts` has of them, but for a token now and then.
    """

    def __init__(self, receive_masks: ReceiveMasks) -> None:
        super().__init__()
        self.receive_masks = receive_masks
        self.masks: dict[str, np.ndarray] = {}
        self.texts: dict[str, list[int]] = {}
        self.proposed: dict[str, list[int]] = {}
        self.num_accepted = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.masks = {}
        if output.masked_req_ids:
            words, counts = self.receive_masks()
            parts = np.split(words, np.cumsum(counts)[:-1])
            self.masks = dict(zip(output.masked_req_ids, parts, strict=True))
        # The message is complete without the masks, and holds nothing of this process.
        result = super().execute(pickle.loads(pickle.dumps(output)))
        self.proposed = {
            req_id: self._propose(req_id, output.num_next_drafts)
            for req_id in self.texts
            if req_id in self.requests
        }
        result.draft_token_ids = pickle.loads(pickle.dumps(self.proposed))
        return result

    def _propose(self, req_id: str, num_drafts: int) -> list[int]:
        state = self.requests[req_id]
        first = len(state.history) - state.num_prompt_tokens
        drafts = self.texts[req_id][first : first + num_drafts]
        for i, draft in enumerate(drafts):
            noise = zlib.crc32(f"{req_id} {first + i}".encode())
            if noise % 4 == 0:
                drafts[i] = (draft + noise // 4) % VOCAB_SIZE
        return drafts

    def _verify(self, state, req_id, drafts, output, result):
        if req_id not in self.masks:
            return super()._verify(state, req_id, drafts, output, result)
        start, rows = state.num_computed, self.masks[req_id]
        proposed = self.proposed[req_id][:drafts]
        assert 1 <= len(rows) <= 1 + len(proposed), "a row after each draft at most"
        plain = replace(output, scheduled_spec_decode_tokens={})
        tokens: list[int] = []
        for i, draft in enumerate([*proposed[: len(rows) - 1], None]):
            self.masks[req_id] = rows[i:]
            tokens += self._run(req_id, 1, plain, result)
            if tokens[-1] != draft:
                break
        self.num_accepted += len(tokens) - 1
        self.num_unsettled[req_id] = drafts
        for position in range(start + len(tokens), start + 1 + drafts):
            self.slots[self._slot(state, position)] = REJECTED
        return tokens

    def _run(self, req_id, count, output, result):
        state = self.requests[req_id]
        tokens = super()._run(req_id, count, output, result)
        verified = bool(output.scheduled_spec_decode_tokens.get(req_id))
        if tokens and req_id in self.masks and not verified:
            del state.history[-1]
            tokens = [choose(state.history, tokens_of(self.masks[req_id][0]))]
            state.history += tokens
        return tokens


class MaskedExecutor(FakeExecutor):
    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        self.worker = MaskedWorker(self.masks.receive)


class OrderedExecutor(MaskedExecutor):
    """Answers calls after the steps before them, as workers in processes of their own do."""

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        call = self._pool.submit(super().collective_rpc, method, timeout, args, kwargs)
        return call.result(60)


class Core:
    """An engine core, and what it has sent so far."""

    def __init__(self, executor=MaskedExecutor, num_stages=1, **options):
        options.setdefault("max_model_len", MAX_LEN)
        config = make_vllm_config(**options)
        config.parallel_config.pipeline_parallel_size = num_stages
        self.core = EngineCore(config, executor)
        self.tokens: dict[str, list[int]] = {}
        self.last = {}

    def add(self, request_id, prompt, params, compilation=None, priority=0):
        message = EngineCoreRequest(request_id, list(prompt), params, 0.0, EOS, priority=priority)
        plain = None
        if params.structured_outputs is not None:
            plain, params.structured_outputs = params.structured_outputs, None
        request = self.core.receive(message)
        if plain is not None:
            params.structured_outputs = plain
            request.grammar = request_grammar(params, compilation)
            if self.core.vllm_config.tokens_to_verify > 1:
                text = expected_tokens(list(prompt), params, MAX_LEN)
                self.core.executor.worker.texts[request_id] = text
        self.core.add_request(request)
        self.tokens[request_id] = []

    def step(self):
        for message in self.core.step().values():
            for output in message.outputs:
                assert output.request_id not in self.last
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.last[output.request_id] = output

    def run(self):
        while self.core.has_work():
            self.step()
        self.core.shutdown()


def make_params(rng, constraint):
    stop = [20 + ord("b")] if rng.random() < 0.2 else None
    return SamplingParams(
        max_tokens=rng.randint(1, 60),
        min_tokens=0 if rng.random() < 0.7 else 1,
        ignore_eos=rng.random() < 0.2,
        stop_token_ids=stop,
        structured_outputs=constraint,
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(9, 30),
    budget=st.sampled_from([16, 24, 128]),
    async_scheduling=st.booleans(),
    caching=st.booleans(),
    max_num_seqs=st.integers(1, 12),
    num_drafts=st.sampled_from([0, 1, 3, 5]),
)
def test_traffic(seed, budget, **options):
    rng = random.Random(seed)
    core = Core(max_num_batched_tokens=budget, **options)
    requests, aborted, stopped = {}, set(), {}
    for i in range(rng.randint(2, 10)):
        constraint = rng.choice([*CONSTRAINTS, None])
        params = make_params(rng, constraint)
        prompt = rng.choices(range(20, VOCAB_SIZE), k=rng.randint(1, 60))
        requests[f"r{i}"] = (prompt, params)
        core.add(f"r{i}", prompt, params)
        for _ in range(rng.randint(0, 4)):
            core.step()
        running = [r for r in requests if r not in core.last and r not in stopped]
        if running and rng.random() < 0.15:
            core.core.abort_requests([victim := rng.choice(running)])
            aborted.add(victim)
        elif running and rng.random() < 0.2 and core.tokens[victim := rng.choice(running)]:
            stopped[victim] = rng.randint(1, len(core.tokens[victim]))
            core.core.stop_requests([StopRequest(victim, stopped[victim])])
    core.run()
    for request_id, (prompt, params) in requests.items():
        if params.structured_outputs is None:
            expected = fakes.expected_tokens(prompt, params, MAX_LEN, EOS)
        else:
            expected = expected_tokens(prompt, params, MAX_LEN)
        got = core.tokens[request_id]
        if request_id not in aborted:
            assert core.last[request_id].finish_reason is not FinishReason.ERROR
        if request_id in aborted or request_id in stopped:
            assert got[: len(expected)] == expected[: len(got)]
        else:
            assert got == expected, (request_id, params)


def test_a_call_is_answered_while_steps_wait_for_masks():
    """A worker answers a call after the steps before it, and those that wait for masks wait for
    what the core makes of earlier results."""
    core = Core(OrderedExecutor, num_stages=2, async_scheduling=True)
    params = SamplingParams(max_tokens=40, structured_outputs=CONSTRAINTS[0])
    core.add("r", [20, 21], params)
    most_in_flight = 0
    while core.core.has_work():
        core.step()
        most_in_flight = max(most_in_flight, len(core.core._in_flight))
        assert core.core.collective_rpc("echo", args=(1,))[0][2] == (1,)
    core.run()
    assert most_in_flight == 2
    assert core.tokens["r"] == expected_tokens([20, 21], params, MAX_LEN)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("constraint", CONSTRAINTS[:3])
def test_drafts_save_steps(constraint, async_scheduling):
    params = SamplingParams(max_tokens=40, structured_outputs=constraint)
    steps = []
    for num_drafts in (0, 3):
        core = Core(async_scheduling=async_scheduling, num_drafts=num_drafts)
        core.add("r", [20, 21], params)
        core.run()
        assert core.tokens["r"] == expected_tokens([20, 21], params, MAX_LEN)
        steps.append(len(core.core.executor.worker.steps))
    accepted = core.core.executor.worker.num_accepted
    assert accepted > 1 and steps[1] <= steps[0] - accepted
    assert core.last["r"].num_drafts[0] == accepted


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_preempted_requests_go_on_where_they_were(num_drafts, async_scheduling):
    core = Core(num_blocks=9, async_scheduling=async_scheduling, num_drafts=num_drafts)
    params = SamplingParams(
        max_tokens=90, structured_outputs=StructuredOutputsParams(regex="[a-f]{150}")
    )
    for i in range(4):
        core.add(f"r{i}", [30 + i] * 20, params.clone())
    core.run()
    steps = core.core.executor.worker.steps
    assert any(step.preempted_req_ids for step in steps), "the arena was meant to be too small"
    for i in range(4):
        assert core.tokens[f"r{i}"] == expected_tokens([30 + i] * 20, params, MAX_LEN)


def test_a_stop_string_takes_back_tokens_of_a_preempted_request():
    core = Core(num_blocks=9)
    params = SamplingParams(
        max_tokens=90, structured_outputs=StructuredOutputsParams(regex="[ab]{10}c[de]{150}")
    )
    for i in range(4):
        core.add(f"r{i}", [30 + i] * 20, params.clone())
    waiting = core.core.scheduler.waiting
    while not any(len(core.tokens[r.request_id]) > 15 for r in waiting):
        core.step()
    victim = next(r for r in waiting if len(core.tokens[r.request_id]) > 15)
    core.core.stop_requests([StopRequest(victim.request_id, 5)])
    core.run()
    assert core.last[victim.request_id].finish_reason is FinishReason.LENGTH
    assert core.tokens[victim.request_id][-1] == core.tokens[victim.request_id][4]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_waiting_for_a_grammar_holds_nobody_up(async_scheduling):
    core = Core(async_scheduling=async_scheduling)
    pending: Future = Future()
    constrained = SamplingParams(max_tokens=8, structured_outputs=CONSTRAINTS[0])
    core.add("slow", [50, 51], constrained, pending)
    core.add("free", [60, 61], SamplingParams(max_tokens=8, ignore_eos=True))
    while "free" not in core.last:
        core.step()
    assert core.tokens["slow"] == [] and "slow" not in core.last
    assert core.core.has_work()
    pending.set_result(prepared(CONSTRAINTS[0]))
    core.run()
    assert core.tokens["slow"] == expected_tokens([50, 51], constrained, MAX_LEN)


def test_a_request_can_leave_while_its_grammar_is_compiled():
    core = Core()
    params = SamplingParams(max_tokens=8, structured_outputs=CONSTRAINTS[0])
    core.add("slow", [50, 51], params, Future())
    core.step()
    core.core.abort_requests(["slow"])
    core.run()
    assert core.tokens["slow"] == []


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone():
    core = Core()
    failed: Future = Future()
    failed.set_exception(RuntimeError("too hard"))
    params = SamplingParams(max_tokens=8, structured_outputs=CONSTRAINTS[0])
    core.add("bad", [50, 51], params, failed)
    core.add("good", [50, 51], params)
    core.run()
    assert core.last["bad"].finish_reason is FinishReason.ERROR
    assert "too hard" in core.last["bad"].error
    assert core.tokens["good"] == expected_tokens([50, 51], params, MAX_LEN)


def test_a_dead_end_ends_its_request_alone():
    core = Core()
    dead = SamplingParams(
        max_tokens=8,
        allowed_token_ids=[20 + ord("a")],
        structured_outputs=StructuredOutputsParams(regex="ab"),
    )
    params = SamplingParams(max_tokens=8, structured_outputs=CONSTRAINTS[0])
    core.add("dead", [50, 51], dead)
    core.add("good", [50, 51], params)
    core.run()
    assert core.last["dead"].finish_reason is FinishReason.ERROR
    assert "no token may follow" in core.last["dead"].error.message
    assert text_of(core.tokens["dead"]) == "a"
    assert core.tokens["good"] == expected_tokens([50, 51], params, MAX_LEN)


def test_the_end_of_a_grammar_is_the_end_of_the_text():
    core = Core()
    params = SamplingParams(
        max_tokens=50,
        min_tokens=20,
        ignore_eos=True,
        structured_outputs=StructuredOutputsParams(choice=["ab"]),
    )
    core.add("r", [50, 51], params)
    core.run()
    assert text_of(core.tokens["r"]) == "ab" and core.tokens["r"][-1] == EOS
    assert core.last["r"].finish_reason is FinishReason.STOP


def test_shutdown_frees_a_launch_that_waits_for_its_masks():
    core = Core(async_scheduling=True)
    params = SamplingParams(max_tokens=8, structured_outputs=CONSTRAINTS[0])
    core.add("r", [50, 51], params, done(CONSTRAINTS[0]))
    output = core.core.scheduler.schedule()
    step = core.core._in_flight.launch(output, core.core._masks_of(output))
    core.core.shutdown()
    assert core.core.executor.is_shut_down
    with pytest.raises(CancelledError):
        step.result.result(10)
