# SPDX-License-Identifier: Apache-2.0
"""Verifying drafts changes nothing: tokens, logprobs, checkpoints and hidden states are those of
decoding token by token, whatever is accepted, and whatever happens to a request meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_checks import MakeEngine, in_this_process, prompts

from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.config.speculative import DRAFTS_KEY
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.kernels.step import AcceptProblem, accept

pytestmark = [pytest.mark.parity, in_this_process]

WIDTHS = (2, 4, 8)
#: fp32 logprobs: a row of a matmul of more rows may be added up in another order
BOUND = 1e-5


def engine(make_engine: MakeEngine, drafts: int, family: str = "qwen3_5", **settings: Any) -> LLM:
    if drafts:
        settings["speculative_config"] = {
            "method": "replay",
            "num_speculative_tokens": drafts,
            "acceptance": 0.6,
            "seed": drafts,
        }
    settings = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 96,
        "async_scheduling": True,
    } | settings
    return make_engine(family, **settings)


Told = dict[int, list[int]]


class Run:
    """Outputs of one engine. What a plain engine generates becomes the drafts of another: `told`
    has it by the order of the calls."""

    def __init__(self, llm: LLM, told: Told | None = None) -> None:
        self.llm, self.told = llm, told
        self.outputs: list[RequestOutput] = []
        self.counted = 0

    def generate(self, token_ids: list[list[int]], lengths: list[int], **fields: Any) -> list[Any]:
        params = []
        for i, length in enumerate(lengths):
            drafts = None
            if self.told is not None:
                drafts = {DRAFTS_KEY: self.told[self.counted + i]}
            given = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2} | fields
            params.append(SamplingParams(max_tokens=length, extra_args=drafts, **given))
        batch = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
        outputs = self.llm.generate(batch, params, use_tqdm=False)
        self.counted += len(lengths)
        self.outputs += outputs
        return outputs

    def tokens(self) -> Told:
        return {i: list(o.outputs[0].token_ids) for i, o in enumerate(self.outputs)}


def batches(run: Run) -> None:
    """More requests than rows, prompts in chunks beside decodes."""
    lengths = (3, 17, 1, 140, 70, 5, 200, 33, 2, 64)
    run.generate(prompts(lengths), [5 + 4 * i for i in range(len(lengths))])


def a_conversation(run: Run) -> None:
    """Each turn begins with what the turns before left in the cache."""
    tokens: list[int] = []
    for question, length in zip(prompts((30, 1, 17, 25)), (19, 16, 17, 21), strict=True):
        tokens += question
        (output,) = run.generate([tokens], [length])
        tokens = tokens + list(output.outputs[0].token_ids)


def forks(run: Run) -> None:
    """Completions of one prompt start from copies of its state; one prompt twice hits the cache."""
    (prompt,) = prompts((65,))
    run.generate([prompt], [24], n=3, temperature=1.0, seed=7)
    run.generate([prompt, prompt[:40]], [12, 12])


def rules(run: Run) -> None:
    """Beside requests whose rules allow no drafts, and with every filter."""
    batch = prompts((20, 30, 9, 44))
    run.generate(batch[:2], [20, 24], temperature=0.9, seed=3, top_k=30, top_p=0.9, min_p=0.01)
    run.generate(batch[2:], [20, 16], presence_penalty=0.7, min_tokens=4)
    run.generate(batch, [24, 3, 18, 9], stop_token_ids=list(range(0, 256, 9)), ignore_eos=True)


def preemptions(run: Run) -> None:
    """Running requests lose their rows and come back."""
    scheduler = run.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, steps = scheduler.schedule, 0

    def schedule_and_preempt() -> Any:
        nonlocal steps
        steps += 1
        if steps in (6, 9, 10):
            while scheduler.running:
                scheduler._preempt_last()
        return schedule()

    scheduler.schedule = schedule_and_preempt
    run.generate(prompts((30, 47)), [34, 40])
    assert steps > 10


def aborts(run: Run) -> None:
    """Others leave at random; their rows and blocks are used again."""
    engine, abandoned = run.llm.llm_engine, prompts((12, 50, 31), seed=5)
    for i, ids in enumerate(abandoned):
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        engine.add_request(f"abandoned-{i}", TokensPrompt(prompt_token_ids=ids), params)
        for _ in range(4 + i):
            engine.step()
        engine.abort_request([f"abandoned-{i}"])
    run.generate(prompts((25, 64)), [30, 22])


SCENARIOS = (batches, a_conversation, forks, rules, preemptions, aborts)


def compare(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        for ours, plain in zip(one.outputs, other.outputs, strict=True):
            assert list(ours.token_ids) == list(plain.token_ids)
            assert ours.finish_reason == plain.finish_reason
            for mine, theirs in zip(ours.logprobs or [], plain.logprobs or [], strict=True):
                assert set(mine) == set(theirs)
                for token, entry in mine.items():
                    assert abs(entry.logprob - theirs[token].logprob) < BOUND


def with_drafts(
    make_engine: MakeEngine, scenario: Callable[[Run], None], width: int, **settings: Any
) -> None:
    plain = Run(engine(make_engine, 0, **settings))
    scenario(plain)
    drafted = Run(engine(make_engine, width - 1, **settings), plain.tokens())
    scenario(drafted)
    compare(drafted.outputs, plain.outputs)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("width", WIDTHS)
def test_drafts_change_nothing(
    width: int, scenario: Callable[[Run], None], make_engine: MakeEngine
) -> None:
    with_drafts(make_engine, scenario, width, enable_prefix_caching=True)


@pytest.mark.parametrize("family", ["qwen3_sliding", "llama"])
def test_other_layers(family: str, make_engine: MakeEngine) -> None:
    with_drafts(make_engine, batches, 4, family=family)


@pytest.mark.parametrize("scenario", [batches, preemptions], ids=lambda f: f.__name__)
def test_every_use_of_state_is_checked(
    scenario: Callable[[Run], None], make_engine: MakeEngine
) -> None:
    with_drafts(make_engine, scenario, 4, sanitize=True, enable_prefix_caching=True)


def test_without_steps_in_flight(make_engine: MakeEngine) -> None:
    with_drafts(make_engine, a_conversation, 4, async_scheduling=False, enable_prefix_caching=True)


def test_the_right_drafts_save_steps(make_engine: MakeEngine) -> None:
    """What is accepted was not computed twice: the steps are as few as the drafts allow."""
    plain = Run(engine(make_engine, 0))
    plain.generate(prompts((9,)), [41])
    config = {"method": "replay", "num_speculative_tokens": 3}
    llm = engine(make_engine, 0, speculative_config=config, async_scheduling=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, widths = scheduler.schedule, []

    def counting() -> Any:
        output = schedule()
        widths.extend(output.num_scheduled_tokens.values())
        return output

    scheduler.schedule = counting
    drafted = Run(llm, plain.tokens())
    drafted.generate(prompts((9,)), [41])
    compare(drafted.outputs, plain.outputs)
    assert widths == [9] + [4] * 10


def test_hidden_states_have_no_row_of_a_rejected_draft(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    rows, told = [], None
    for drafter in (None, {"method": "replay", "num_speculative_tokens": 3, "acceptance": 0.5}):
        extraction: dict[str, Any] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
        }
        if drafter is not None:
            extraction["drafter"] = drafter
        llm = engine(
            make_engine,
            0,
            speculative_config=extraction,
            kv_transfer_config={
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(tmp_path / str(drafter is None))
                },
            },
        )
        outputs = []
        for i, ids in enumerate(prompts((20, 130, 7))):
            extra: dict[str, Any] = {"kv_transfer_params": {"include_output_tokens": True}}
            if told is not None:
                extra[DRAFTS_KEY] = told[i]
            params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True, extra_args=extra)
            prompt = TokensPrompt(prompt_token_ids=ids)
            outputs += llm.generate([prompt], params, use_tqdm=False)
        told = [list(output.outputs[0].token_ids) for output in outputs]
        rows.append(
            [load_hidden_states(o.kv_transfer_params["hidden_states_path"]) for o in outputs]
        )
    for plain, drafted in zip(*rows, strict=True):
        assert torch.equal(plain["token_ids"], drafted["token_ids"])
        difference = (plain["hidden_states"] - drafted["hidden_states"]).abs().max()
        assert plain["hidden_states"].shape == drafted["hidden_states"].shape
        assert difference < BOUND


# ---- the comparison notices ----------------------------------------------------------------------


def _accept_all(problem: AcceptProblem) -> None:
    accept(problem)
    counts = problem.requests[:, 2].clamp(max=problem.progress.width)
    problem.counts[0].copy_(torch.maximum(problem.counts[0], counts))


def _forget_the_inputs(problem: AcceptProblem) -> None:
    accept(problem)
    problem.progress.taken.zero_()


def _forget_the_updates(problem: AcceptProblem) -> None:
    pending = problem.progress.pending.clone()
    accept(problem)
    problem.progress.pending.copy_(pending)


def _one_too_many(problem: AcceptProblem) -> None:
    computed = problem.progress.computed.clone()
    accept(replace(problem))
    more = problem.progress.computed > computed
    problem.progress.computed.add_(more.to(computed.dtype))


@pytest.mark.parametrize(
    "broken", [_accept_all, _forget_the_inputs, _forget_the_updates, _one_too_many]
)
def test_a_broken_mechanism_is_noticed(
    broken: Callable[[AcceptProblem], None],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm.v1.worker.step_inputs.accept", broken)
    with pytest.raises((AssertionError, RuntimeError)):
        with_drafts(make_engine, batches, 4)
