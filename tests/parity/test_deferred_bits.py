# SPDX-License-Identifier: Apache-2.0
"""Writing recurrent state back every few tokens gives the bits of writing it with every token.

On a CPU with the reference kernels, whose ring is what the GPU's kernels are tested against. Each
place where a state has to be complete is also broken on purpose, and the check has to notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from parity_checks import MakeEngine, core_in_this_process, in_this_process, prompts

from tests.distributed.kv_transfer.toy_connectors import StateReader
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.kernels.naive import NaiveKernels
from vllm.kernels.step import JournalCommits
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import BlockCopy
from vllm.v1.worker.state_journals import StateJournals

pytestmark = [pytest.mark.slow, pytest.mark.parity, core_in_this_process]

INTERVALS = (2, 8)


@pytest.fixture(autouse=True)
def _kernels_with_a_ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU the reference kernels, which keep a ring; a GPU has its own."""
    if not torch.cuda.is_available():
        monkeypatch.setitem(vars(current_platform), "kernels", NaiveKernels())
        monkeypatch.setattr(type(current_platform), "defers_commit", True)
    yield


def run(llm: LLM, *token_ids: list[int], max_tokens: int = 12, **fields: Any) -> list[Any]:
    """Every token of every completion with its exact logprob."""
    cache = {k: fields.pop(k) for k in list(fields) if k.startswith("cache_")}
    settings = {"temperature": 0, "ignore_eos": True, "logprobs": 0, **fields}
    params = SamplingParams(max_tokens=max_tokens, **settings)
    batch = [TokensPrompt(prompt_token_ids=ids, **cache) for ids in token_ids]
    return bits(llm.generate(batch, params, use_tqdm=False))


def bits(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        (token, entry[token].logprob)
        for output in outputs
        for completion in output.outputs
        for token, entry in zip(completion.token_ids, completion.logprobs or [], strict=True)
    ]


def defers(llm: LLM) -> bool:
    return llm.collective_rpc(lambda worker: worker.model_runner.journals is not None)[0]


def engine(make_engine: MakeEngine, interval: int, **settings: Any) -> LLM:
    """Its steps have one size on a GPU, so that both sides run the same matmuls."""
    llm = make_engine(
        "qwen3_5",
        deferred_commit_tokens=interval,
        compilation_config={"cudagraph_capture_sizes": [4]},
        **{
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "long_prefill_token_threshold": 63,
            **settings,
        },
    )
    assert defers(llm) is (interval > 1)
    return llm


# ---- the same bits -------------------------------------------------------------------------------


def batches_come_and_go(llm: LLM) -> list[Any]:
    """Ten requests of different lengths share four rows: every row is used again."""
    lengths = (3, 17, 1, 40, 70, 5, 9, 33, 2, 64)
    params = [
        SamplingParams(temperature=0, max_tokens=5 + 3 * i, ignore_eos=True, logprobs=0)
        for i in range(len(lengths))
    ]
    batch = [TokensPrompt(prompt_token_ids=ids) for ids in prompts(lengths)]
    return bits(llm.generate(batch, params, use_tqdm=False))


def a_conversation(llm: LLM) -> list[Any]:
    """Each turn starts from the state that the answer before it left."""
    tokens: list[int] = []
    found = []
    for question, length in zip(prompts((30, 1, 17, 25)), (9, 6, 7, 11), strict=True):
        tokens += question
        found += run(llm, tokens, max_tokens=length)
        tokens += [token for token, _ in found[-length:]]
    return found


def forks(llm: LLM) -> list[Any]:
    """Samples start from copies of one state."""
    (prompt,) = prompts((65,))
    return run(llm, prompt, n=4, temperature=1.0, seed=7)


def one_token_at_a_time(llm: LLM) -> list[Any]:
    """Marks cut a prompt into pieces, some of one token: those run as decodes, and their states
    are copied. The second prompt starts from the last such copy."""
    first, tail = prompts((40, 20))
    marks = [8, 9, 10, 11, 30]
    found = run(llm, first, cache_checkpoints=marks)
    return found + run(llm, first[:11] + tail) + run(llm, first[:9] + tail)


def prompts_in_uneven_pieces(llm: LLM) -> list[Any]:
    """The first prompt leaves the second one token of several steps, which run as decodes, then
    most of one, which is a prefill."""
    return run(llm, *prompts((200, 90)), max_tokens=3)


def preemptions(llm: LLM) -> list[Any]:
    """Running requests lose their rows and come back."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, steps = scheduler.schedule, 0

    def schedule_and_preempt() -> Any:
        nonlocal steps
        steps += 1
        if steps in (9, 15, 16):
            while scheduler.running:
                scheduler._preempt_last()
        return schedule()

    scheduler.schedule = schedule_and_preempt
    found = run(llm, *prompts((30, 47)), max_tokens=24)
    assert steps > 16
    return found


SCENARIOS = (
    batches_come_and_go,
    a_conversation,
    forks,
    one_token_at_a_time,
    prompts_in_uneven_pieces,
    preemptions,
)


#: what scenarios gave where every token is written, by the scenario and its engine's settings
_expected: dict[Any, list[Any]] = {}


def same_bits(make_engine: MakeEngine, scenario: Any, interval: int, **settings: Any) -> None:
    settings = {"enable_prefix_caching": True, **settings}
    key = (scenario, *sorted(settings.items()))
    if key not in _expected:
        _expected[key] = scenario(engine(make_engine, 1, **settings))
    assert scenario(engine(make_engine, interval, **settings)) == _expected[key]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("interval", INTERVALS)
def test_bits(scenario: Any, interval: int, make_engine: MakeEngine) -> None:
    same_bits(make_engine, scenario, interval)


@pytest.mark.parametrize("scenario", [a_conversation, preemptions])
def test_bits_with_steps_in_flight(scenario: Any, make_engine: MakeEngine) -> None:
    same_bits(make_engine, scenario, 8, async_scheduling=True)


@pytest.mark.parametrize("scenario", [batches_come_and_go, a_conversation])
def test_bits_of_a_bf16_state(scenario: Any, make_engine: MakeEngine) -> None:
    same_bits(make_engine, scenario, 4, mamba_ssm_cache_dtype="bfloat16")


# ---- each flush is needed ------------------------------------------------------------------------


def _no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows commit when their slots are full alone, so that what is pending when a scenario needs
    it does not depend on how many steps the warm-up took."""
    begin_step = StateJournals.begin_step

    def at_step_one(self: StateJournals, order: Any, *how: bool) -> JournalCommits:
        self._turn = 0
        return begin_step(self, order, *how)

    monkeypatch.setattr(StateJournals, "begin_step", at_step_one)


def _forget_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: StateJournals, row: int, num_kept_tokens: int | None = None) -> None:
        self.waiting[row] = False

    monkeypatch.setattr(StateJournals, "leave", leave)


def _copy_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before_copies = StateJournals.before_copies

    def only_who_left(self: StateJournals, copies: Sequence[BlockCopy]) -> None:
        before_copies(self, [])

    monkeypatch.setattr(StateJournals, "before_copies", only_who_left)


def _prefill_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_step = StateJournals.begin_step

    def without_flush(self: StateJournals, order: Any, *how: bool) -> JournalCommits:
        self.waiting[order.rows[order.num_decodes :]] = False
        return begin_step(self, order, *how)

    monkeypatch.setattr(StateJournals, "begin_step", without_flush)


def _lose_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_step = StateJournals.begin_step

    def one_less(self: StateJournals, order: Any, *how: bool) -> JournalCommits:
        pending = self._progress.pending
        pending -= (pending == 3).to(pending.dtype)
        return begin_step(self, order, *how)

    monkeypatch.setattr(StateJournals, "begin_step", one_less)


@pytest.mark.parametrize(
    ("breakage", "scenario"),
    [
        (_forget_who_left, a_conversation),
        (_forget_who_left, preemptions),
        (_copy_as_it_is, one_token_at_a_time),
        (_prefill_as_it_is, prompts_in_uneven_pieces),
        (_lose_a_token, batches_come_and_go),
        (_lose_a_token, forks),
    ],
)
def test_breaking_the_mechanism_is_noticed(
    breakage: Any, scenario: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_turns(monkeypatch)
    same_bits(make_engine, scenario, 8)
    breakage(monkeypatch)
    with pytest.raises(AssertionError):
        same_bits(make_engine, scenario, 8)


# ---- connectors ----------------------------------------------------------------------------------


def states_seen(make_engine: MakeEngine, interval: int, every: int) -> dict[Any, Any]:
    """What a connector that reads in every `every`th step finds in the blocks after each step."""
    llm = engine(
        make_engine,
        interval,
        kv_transfer_config={
            "kv_connector": "StateReader",
            "kv_connector_module_path": "tests.distributed.kv_transfer.toy_connectors",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"every": every},
        },
    )
    StateReader.seen.clear()
    run(llm, *prompts((30, 5, 17)), max_tokens=30)
    return dict(StateReader.seen)


def complete_where_read(make_engine: MakeEngine, interval: int) -> None:
    """And only there: the steps without work for it do not write the states."""
    expected = states_seen(make_engine, 1, 1)
    found = states_seen(make_engine, interval, 5)
    assert found.keys() == expected.keys()
    complete = {key: torch.equal(found[key][1], expected[key][1]) for key in found}
    read = [key for key, (reads, _) in found.items() if reads]
    assert len(read) > 15 and all(complete[key] for key in read)
    others = [complete[key] for key in found if key not in read]
    assert sum(others) <= len(others) * (1 / interval + 0.25)


@in_this_process
@pytest.mark.parametrize("interval", INTERVALS)
def test_a_connector_finds_complete_states_where_it_reads(
    interval: int, make_engine: MakeEngine
) -> None:
    complete_where_read(make_engine, interval)


def _commit_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_step = StateJournals.begin_step
    monkeypatch.setattr(
        StateJournals, "begin_step", lambda self, order, *_: begin_step(self, order)
    )


def _commit_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateReader, "will_read_recurrent_state", lambda self, metadata: True)


@in_this_process
@pytest.mark.parametrize("breakage", [_commit_in_turn, _commit_always])
def test_states_that_are_incomplete_or_written_for_nobody_are_noticed(
    breakage: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)
    with pytest.raises(AssertionError):
        complete_where_read(make_engine, 8)
