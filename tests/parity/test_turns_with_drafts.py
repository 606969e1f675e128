# SPDX-License-Identifier: Apache-2.0
"""Each turn of a conversation finds in the cache what it finds without a drafter: the state after
the last token of the turn before, wherever in a run of accepted drafts that token was."""

from __future__ import annotations

from typing import Any

import pytest
from draft_scenarios import Run, compare, engine
from parity_checks import MakeEngine, in_this_process, prompts

from tests.nightly import covering
from vllm.kernels import step

pytestmark = [pytest.mark.parity, in_this_process]

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
