# SPDX-License-Identifier: Apache-2.0
"""Steps verify now more, now fewer drafts: tokens are those of decoding one by one, and drafts
those of an offline run, whatever the steps before and in flight verified."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from draft_scenarios import SCENARIOS, Run, a_conversation, batches, preemptions, with_drafts
from drafter_engines import DRAFTS, Changes, Methods, Watched, check_proposals, engine
from parity_checks import MakeEngine, core_in_this_process, in_this_process, one_stage
from test_model_drafters import aborts, rules, shared_beginnings
from test_model_drafters import batches as layered_batches
from test_model_drafters import preemptions as layered_preemptions
from test_turns_with_drafts import ENDS, converse, unended

from tests.nightly import nightly
from vllm.v1.worker.input_batch import InputBatch

pytestmark = [pytest.mark.slow, pytest.mark.parity, one_stage, core_in_this_process]

#: with 7 drafts at most: steps of 1, 4 and 8 tokens per request
WIDTH = 8
LADDER = (0, 3, 7)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
def test_drafts_of_any_number_change_nothing(
    scenario: Callable[[Run], None], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted and rejected at random, under preemption, out of the prefix cache, with grammars."""
    changes = Changes(seed=len(scenario.__name__)).use(monkeypatch)
    with_drafts(make_engine, scenario, WIDTH, enable_prefix_caching=True)
    assert set(changes.made) == set(itertools.permutations(LADDER, 2))


@pytest.mark.parametrize(
    "scenario", [a_conversation, preemptions, *nightly(*SCENARIOS)], ids=lambda f: f.__name__
)
def test_prompt_lookup(
    scenario: Callable[[Run], None], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Changes().use(monkeypatch)
    with_drafts(make_engine, scenario, 6, "ngram", enable_prefix_caching=True)


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [
        (preemptions, {"sanitize": True}),
        (a_conversation, {"async_scheduling": False}),
        (batches, {"family": "llama"}),
    ],
)
def test_other_engines(
    scenario: Callable[[Run], None],
    settings: dict[str, Any],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Changes(seed=2).use(monkeypatch)
    with_drafts(make_engine, scenario, WIDTH, enable_prefix_caching=True, **settings)


# ---- drafters with layers of their own -----------------------------------------------------------

CASES = {
    "mtp": (layered_batches, shared_beginnings, layered_preemptions, rules),
    "eagle3": (shared_beginnings, layered_preemptions),
    "dflash": (layered_batches, layered_preemptions, aborts),
    "draft_model-hybrid": (layered_preemptions,),
    "draft_model-hybrid-itself": (layered_batches, aborts),
    "draft_model-itself": (shared_beginnings, layered_preemptions),
}


@in_this_process
@pytest.mark.parametrize(
    ("name", "scenario"),
    [(name, scenario) for name, scenarios in CASES.items() for scenario in scenarios],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_text_and_proposals(
    name: str,
    scenario: Callable[[Watched], None],
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = Changes().use(monkeypatch)
    method = methods(name)
    plain, drafted = engine(make_engine, method, 0), engine(make_engine, method, DRAFTS)
    scenario(plain)
    scenario(drafted)
    assert drafted.texts() == plain.texts()
    assert check_proposals(drafted, method) < 0.2
    assert {len(drafts) for _, _, drafts in drafted.proposed} == {1, 3}
    assert set(changes.made) == set(itertools.permutations((0, 1, 3), 2))


@in_this_process
@pytest.mark.parametrize(
    ("name", "ends", "asynchronous"),
    [
        ("mtp", "token", True),
        ("eagle3", "length", True),
        ("dflash", "token", False),
        ("draft_model-hybrid-itself", "string", True),
    ],
)
def test_turns_with_accepted_drafts(
    name: str,
    ends: str,
    asynchronous: bool,
    methods: Methods,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of any length are accepted; each turn begins with what the turns before left."""
    Changes(seed=1).use(monkeypatch)
    method = methods(name)
    settings: dict[str, Any] = {"async_scheduling": asynchronous, "max_model_len": 1024}
    plain = engine(make_engine, method, 0, **settings)
    expected = converse(plain, ENDS[ends])
    endless = unended(plain, expected)
    drafted = engine(make_engine, method, DRAFTS, **settings)
    found = converse(drafted, ENDS[ends], endless)
    assert found.answers == expected.answers
    assert check_proposals(drafted, method) < 0.2
    if ends != "string":
        assert sum(found.cached) >= 0.99 * sum(expected.cached)


# ---- the comparison notices ----------------------------------------------------------------------


def test_a_step_too_narrow_for_its_drafts_is_noticed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a worker padded decodes to the width of the step before."""
    order, last = InputBatch.order, [1]

    def late(batch: InputBatch, *args: Any) -> Any:
        found, width = order(batch, *args), last[0]
        last[0] = found.width
        object.__setattr__(found, "width", width)
        return found

    monkeypatch.setattr(InputBatch, "order", late)
    Changes().use(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        with_drafts(make_engine, batches, WIDTH)
