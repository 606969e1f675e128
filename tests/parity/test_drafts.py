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
from draft_scenarios import (
    BOUND,
    SCENARIOS,
    Run,
    a_conversation,
    batches,
    compare,
    constraints,
    engine,
    grammars,
    preemptions,
    with_drafts,
)
from parity_checks import MakeEngine, core_in_this_process, one_stage, prompts

from tests.nightly import nightly
from vllm import SamplingParams, TokensPrompt
from vllm.config.speculative import DRAFTS_KEY
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.kernels.step import AcceptProblem, accept
from vllm.v1.structured_output.grammar import RequestGrammar
from vllm.v1.worker.step_inputs import StepInputBuilder

pytestmark = [pytest.mark.slow, pytest.mark.parity, one_stage, core_in_this_process]

#: by scenario, two widths of three: what is accepted decides what a scenario meets, and the least
#: and the largest width meet every second of them; the rest is nightly
WIDTHS = [
    (width, scenario)
    for index, scenario in enumerate(SCENARIOS)
    for width in (4, (2, 8)[index % 2])
]
OTHER_WIDTHS = [(w, s) for s in SCENARIOS for w in (2, 8) if (w, s) not in WIDTHS]


@pytest.mark.parametrize(
    ("width", "scenario"),
    [*WIDTHS, *nightly(*OTHER_WIDTHS)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_drafts_change_nothing(
    width: int, scenario: Callable[[Run], None], make_engine: MakeEngine
) -> None:
    with_drafts(make_engine, scenario, width, enable_prefix_caching=True)


@pytest.mark.parametrize("family", ["qwen3_sliding", "llama"])
def test_other_layers(family: str, make_engine: MakeEngine) -> None:
    with_drafts(make_engine, batches, 4, family=family)


@pytest.mark.parametrize(
    "scenario", [batches, preemptions, *nightly(grammars)], ids=lambda f: f.__name__
)
def test_every_use_of_state_is_checked(
    scenario: Callable[[Run], None], make_engine: MakeEngine
) -> None:
    with_drafts(make_engine, scenario, 4, sanitize=True, enable_prefix_caching=True)


@pytest.mark.parametrize("scenario", [a_conversation, *nightly(grammars)], ids=lambda f: f.__name__)
def test_without_steps_in_flight(scenario: Callable[[Run], None], make_engine: MakeEngine) -> None:
    with_drafts(make_engine, scenario, 4, async_scheduling=False, enable_prefix_caching=True)


def one_grammar(run: Run) -> None:
    run.generate(prompts((9, 20)), [30, 30], constraints()[:2])


def test_drafts_save_steps_of_a_grammar(make_engine: MakeEngine) -> None:
    """And are counted: each step has a token of the model's beside the accepted ones."""
    drafted = with_drafts(make_engine, one_grammar, 4)
    tokens = sum(len(o.outputs[0].token_ids) for o in drafted.outputs)
    accepted, rejected = drafted.drafts()
    assert accepted > tokens / 3 and rejected > 3


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


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_accepted_drafts_are_part_of_the_completion(
    async_scheduling: bool, make_engine: MakeEngine
) -> None:
    """Wherever it ends in a run of right drafts: seven of a step's eight tokens are drafts."""
    plain = Run(engine(make_engine, 0))
    (output,) = plain.generate(prompts((9,)), [24])
    told, text = list(output.outputs[0].token_ids), output.outputs[0].text
    config = {"method": "replay", "num_speculative_tokens": 7, "full_width": True}
    llm = engine(make_engine, 0, speculative_config=config, async_scheduling=async_scheduling)
    ends: list[dict[str, Any]] = [
        *({"max_tokens": count} for count in range(1, 24)),
        *({"max_tokens": 24, "stop_token_ids": [token]} for token in told),
        *({"max_tokens": 24, "stop": [text[i : i + 2]]} for i in range(len(text) - 1)),
    ]
    fixed: dict[str, Any] = {"temperature": 0, "extra_args": {DRAFTS_KEY: told}}
    params = [SamplingParams(ignore_eos=True, **fixed, **end) for end in ends]
    batch = [TokensPrompt(prompt_token_ids=prompts((9,))[0])] * len(params)
    lengths = set()
    for output in llm.generate(batch, params, use_tqdm=False):
        completion = output.outputs[0]
        count = len(completion.token_ids)
        accepted, rejected = completion.num_drafts or (0, 0)
        # A request's first token, and its second where its drafts came too late, had no drafts.
        undrafted = [1 + later + (count - 1 - later) // 8 for later in (0, 1)]
        assert count - accepted in undrafted or count == 1
        assert rejected >= 0 and accepted < count
        lengths.add(count)
    assert len(lengths) > 15


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


def _stay_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestGrammar, "_go_back", lambda grammar, num_tokens: None)


def _mask_only_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = RequestGrammar.fill
    monkeypatch.setattr(RequestGrammar, "fill", lambda g, masks, row, drafts: fill(g, masks, row))
    monkeypatch.setattr(StepInputBuilder, "limit_samples", lambda *args: None)


def _mask_by_other_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they came from another row, or from an earlier step."""
    fill = RequestGrammar.fill

    def misled(grammar: Any, masks: Any, row: int, drafts: list[int]) -> int:
        count = fill(grammar, masks, row, drafts)
        masks[row + 1 : row + count] = masks[row]
        return count

    monkeypatch.setattr(RequestGrammar, "fill", misled)


@pytest.mark.parametrize("fault", [_stay_ahead, _mask_only_the_first_row, _mask_by_other_drafts])
def test_a_wrong_mask_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_drafts(make_engine, one_grammar, 4)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        with_drafts(make_engine, one_grammar, 4)
