# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup changes no output, and what it drafts is accepted where texts repeat themselves."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from draft_scenarios import SCENARIOS, Run, engine, with_drafts
from parity_checks import MakeEngine, core_in_this_process, one_stage

from tests.nightly import nightly
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched import draft_policy

pytestmark = [pytest.mark.slow, pytest.mark.parity, one_stage, core_in_this_process]


#: a random model repeats itself when it has little to choose from
FEW = [40, 41, 42]


@pytest.fixture(autouse=True)
def drafting_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_policy, "BALANCE", 10**9)


def repetitive(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts in which pieces come again, now and then with another token in between."""
    source = random.Random(seed)
    prompts = []
    for _ in range(count):
        piece = [source.randrange(256) for _ in range(source.randint(1, 9))]
        prompt: list[int] = []
        while len(prompt) < source.randint(4, 40):
            prompt += piece if source.random() < 0.8 else [source.randrange(256)]
        prompts.append(prompt)
    return prompts


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
def test_scenarios(scenario: Callable[[Run], None], make_engine: MakeEngine) -> None:
    with_drafts(make_engine, scenario, 4, "ngram", enable_prefix_caching=True)


@pytest.mark.parametrize(
    ("family", "count"), [("qwen3_5", 200), ("llama", 60), *nightly(("qwen3_5", 500))]
)
def test_many_prompts(family: str, count: int, make_engine: MakeEngine) -> None:
    def run(run: Run) -> None:
        lengths = [8 + i % 5 for i in range(count // 2)]
        run.generate(repetitive(count // 2), lengths, logprobs=None)
        given = repetitive(count // 2, seed=1)
        run.generate(given, lengths, logprobs=None, allowed_token_ids=FEW)

    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 256}
    drafted = with_drafts(make_engine, run, 4, "ngram", family=family, **settings)
    accepted, rejected = drafted.drafts()
    assert accepted > count // 4 and rejected > 0


def test_counts_in_the_output_are_those_of_the_metrics(make_engine: MakeEngine) -> None:
    llm = engine(make_engine, 3, method="ngram", disable_log_stats=False)
    run = Run(llm)
    run.generate(repetitive(20), [20] * 20, allowed_token_ids=FEW)
    found = {metric.name: metric for metric in llm.get_metrics()}
    accepted, rejected = run.drafts()
    assert accepted > 0
    assert found["vllm:spec_decode_num_accepted_tokens"].value == accepted
    assert found["vllm:spec_decode_num_draft_tokens"].value == accepted + rejected


def test_a_grammar_repeats_itself_beside_free_text(make_engine: MakeEngine) -> None:
    found = []
    for drafts in (0, 3):
        run = Run(engine(make_engine, drafts, method="ngram"))
        grammar = StructuredOutputsParams(regex="(ab|ba){4,20}")
        params = [
            SamplingParams(max_tokens=24, temperature=1.0, seed=5, structured_outputs=grammar),
            SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, allowed_token_ids=FEW),
        ]
        batch = [TokensPrompt(prompt_token_ids=ids) for ids in repetitive(2)]
        found.append(run.llm.generate(batch, params, use_tqdm=False))
    plain, drafted = ([output.outputs[0] for output in outputs] for outputs in found)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    for one in drafted:
        assert one.num_drafts is not None and min(one.num_drafts) > 0
