# SPDX-License-Identifier: Apache-2.0
"""In bfloat16 text with drafts differs from text without them only where two tokens tie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_scenarios import Run, batches, engine
from drafter_engines import DRAFTS, Methods, always
from parity_checks import MakeEngine, in_this_process
from ties import BOUND, Difference, check_ties, first_difference

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.v1.core.sched.draft_policy import DraftPolicy

pytestmark = [pytest.mark.parity, in_this_process]

ROOT = Path(__file__).parents[2]


def completion(*rows: dict[int, float]) -> CompletionOutput:
    """Whose tokens are the first of each row."""
    logprobs = [{token: Logprob(value) for token, value in row.items()} for row in rows]
    return CompletionOutput(0, "", [next(iter(row)) for row in rows], 0.0, logprobs)


def test_the_first_difference_is_found_with_both_margins() -> None:
    same, more = {7: -0.5, 8: -1.0}, {1: -0.1, 2: -3.0}
    one = completion(same, {4: -1.0, 5: -1.0625}, more)
    other = completion(same, {5: -0.875, 4: -1.0}, {2: -0.1})
    found = first_difference(one, other)
    assert found == Difference(1, (0.0625, 0.125))
    assert found.is_tie(0.125) and not found.is_tie(0.1)
    assert first_difference(one, one) is None


def test_a_token_that_the_other_run_does_not_consider_is_no_tie() -> None:
    found = first_difference(completion({4: -1.0, 5: -1.0}), completion({5: -1.0, 6: -1.0}))
    assert found == Difference(0, (0.0, float("inf"))) and not found.is_tie(1e9)


def test_what_cannot_be_judged_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 tokens against 1"):
        first_difference(completion({4: -1.0}, {5: -1.0}), completion({4: -1.0}))
    bare = CompletionOutput(0, "", [4], 0.0, None)
    with pytest.raises(ValueError, match="ask for at least 2"):
        first_difference(bare, completion({5: -1.0}))


def test_the_bound_is_the_documented_one() -> None:
    text = (ROOT / "docs" / "speculative_decoding.md").read_text()
    (documented,) = re.findall(r"log-probabilities\s+lie within \*\*([0-9.]+)\*\*", text)
    assert float(documented) == BOUND


def run_batches(make_engine: MakeEngine, drafts: int, told: Any = None, **settings: Any) -> Run:
    settings = {"dtype": torch.bfloat16} | settings
    run = Run(engine(make_engine, drafts, **settings), told)
    batches(run)
    return run


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_drafts_change_text_at_ties_only(family: str, make_engine: MakeEngine) -> None:
    plain = run_batches(make_engine, 0, family=family)
    drafted = run_batches(make_engine, DRAFTS, plain.tokens(), family=family)
    assert min(drafted.drafts()) > 30
    check_ties(drafted.outputs, plain.outputs)


def test_heads_change_text_at_ties_only(
    methods: Methods, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftPolicy, "choose", always)
    method = methods("mtp")
    settings: dict[str, Any] = {"model": str(method.target)}
    plain = run_batches(make_engine, 0, **settings)
    speculation = {"speculative_config": method.config | {"num_speculative_tokens": DRAFTS}}
    drafted = run_batches(make_engine, 0, **settings, **speculation)
    assert drafted.drafts()[1] > 30
    check_ties(drafted.outputs, plain.outputs)


def test_what_is_no_tie_is_noticed(make_engine: MakeEngine) -> None:
    """A token that is a little more likely than it should be."""

    class Pushed(Run):
        def generate(self, *args: Any, **fields: Any) -> list[Any]:
            return super().generate(*args, logit_bias={17: 1.0}, **fields)

    plain = run_batches(make_engine, 0)
    pushed = Pushed(engine(make_engine, 0, dtype=torch.bfloat16))
    batches(pushed)
    with pytest.raises(AssertionError, match="Difference"):
        check_ties(pushed.outputs, plain.outputs)
