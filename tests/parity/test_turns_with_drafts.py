# SPDX-License-Identifier: Apache-2.0
"""Each turn of a conversation finds in the cache what it finds without a drafter: the state after
the last token of the turn before, wherever in a run of accepted drafts that token was."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from draft_scenarios import Run, compare, engine
from drafter_engines import DRAFTS, Methods, Watched, always, check_proposals
from drafter_engines import engine as layer_engine
from parity_checks import MakeEngine, in_this_process, one_stage, prompts

from tests.nightly import covering, nightly
from vllm.kernels import step
from vllm.v1.core.sched.draft_policy import DraftPolicy

pytestmark = [pytest.mark.slow, pytest.mark.parity, one_stage]

TURNS = (30, 5, 17, 1, 25, 9, 40, 3)
STOPS = list(range(0, 256, 13))


def talk(run: Run, ends: dict[str, Any], answers: list[list[int]] | None = None) -> None:
    """Turns whose answers end by `ends`; `answers` instead of what was generated go on in the
    history, so that two runs have the same prompts."""
    history: list[int] = []
    for i, question in enumerate(prompts(TURNS)):
        history += question
        (output,) = run.generate([history], [24 + i], **ends)
        history = history + (list(output.outputs[0].token_ids) if answers is None else answers[i])


def cached(run: Run) -> list[int]:
    return [output.num_cached_tokens or 0 for output in run.outputs]


@pytest.mark.parametrize(
    ("family", "ends", "asynchronous"),
    covering(["qwen3_5", "llama"], [{}, {"stop_token_ids": STOPS}], [True, False]),
)
def test_turns_hit_as_without_a_drafter(
    family: str, ends: dict[str, Any], asynchronous: bool, make_engine: MakeEngine
) -> None:
    settings: dict[str, Any] = {
        "family": family,
        "async_scheduling": asynchronous,
        "enable_prefix_caching": True,
        "max_model_len": 1024,
    }
    plain = Run(engine(make_engine, 0, **settings))
    talk(plain, ends)
    answers = list(plain.tokens().values())
    # What would follow the end is proposed as well, and is what the model would say.
    endless = Run(engine(make_engine, 0, **settings))
    talk(endless, {}, answers)
    drafted = Run(engine(make_engine, 3, **settings), endless.tokens())
    talk(drafted, ends)
    compare(drafted.outputs, plain.outputs)
    assert drafted.drafts()[0] > 20
    assert cached(drafted) == cached(plain)
    assert sum(cached(plain)) > 500


def test_the_comparison_notices_drafts_after_the_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(problem: Any) -> None:
        problem.progress.stops.fill_(-1)
        step.accept(problem)

    monkeypatch.setattr("vllm.v1.worker.step_inputs.accept", blind)
    with pytest.raises(AssertionError):
        test_turns_hit_as_without_a_drafter("qwen3_5", {"stop_token_ids": STOPS}, True, make_engine)


# ---- drafters with layers of their own -----------------------------------------------------------


@dataclass
class Turns:
    """A conversation: the prompt of each turn, and what followed it."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def add(self, output: Any) -> None:
        self.prompts.append(list(output.prompt_token_ids))
        self.answers.append(list(output.outputs[0].token_ids))
        self.cached.append(output.num_cached_tokens or 0)


#: long enough that a block more or less is no hundredth
QUESTIONS = (90, 15, 51, 3, 75, 27, 120, 9)


def converse(run: Watched, ends: dict[str, Any], like: Turns | None = None) -> Turns:
    """With `like`, the answers of a run that did not end its turns are what is drafted."""
    found, history = Turns(), list[int]()
    for i, question in enumerate(prompts(QUESTIONS)):
        history = history + question
        if like is not None:
            run.told = history + like.answers[i]
        (output,) = run.generate([history], [24 + i], **ends)
        found.add(output)
        history = history + found.answers[-1]
    return found


def unended(run: Watched, turns: Turns) -> Turns:
    """What would have followed the ends of the turns, too."""
    found = Turns()
    for i, prompt in enumerate(turns.prompts):
        (output,) = run.generate([prompt], [24 + i])
        found.add(output)
    return found


ENDS: dict[str, dict[str, Any]] = {
    "length": {},
    "token": {"stop_token_ids": list(range(0, 256, 32))},
    "string": {"stop": ["e", "1", "th", "Q", "z"]},
}
IN_EVERY_RUN = {
    ("mtp", "token", True),
    ("mtp", "length", False),
    ("eagle3", "string", True),
    ("eagle3-llama", "token", True),
    ("dflash", "token", True),
    ("draft_model-hybrid-itself", "string", False),
}
NAMES = ("mtp", "eagle3", "eagle3-llama", "dflash", "dflash-llama", "draft_model-hybrid-itself")


@in_this_process
@pytest.mark.parametrize(
    ("name", "ends", "asynchronous"),
    [
        case if case in IN_EVERY_RUN else nightly(case)[0]
        for case in itertools.product(NAMES, ENDS, (True, False))
    ],
)
def test_hits_and_proposals_of_turns(
    name: str,
    ends: str,
    asynchronous: bool,
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of drafts are accepted and rejected, whatever heads of random weights propose; what they
    do propose is what they would cold. A stop string may end inside a run: the state after it is
    then not kept, and the next turn continues from the end of this one's prompt."""
    monkeypatch.setattr(DraftPolicy, "choose", always)
    method = methods(name)
    settings: dict[str, Any] = {"async_scheduling": asynchronous, "max_model_len": 1024}
    plain = layer_engine(make_engine, method, 0, **settings)
    expected = converse(plain, ENDS[ends])
    endless = unended(plain, expected)
    drafted = layer_engine(make_engine, method, DRAFTS, **settings)
    found = converse(drafted, ENDS[ends], endless)
    assert found.answers == expected.answers
    assert len(drafted.proposed) < 0.6 * sum(map(len, found.answers))
    assert check_proposals(drafted, method) < 0.2
    if ends != "string":
        assert sum(found.cached) >= 0.99 * sum(expected.cached)
        return
    hits = zip(found.prompts[:-1], found.cached[1:], expected.cached[1:], strict=True)
    for before, hit, without in hits:
        assert without - 1 <= hit or hit == len(before) - 1
