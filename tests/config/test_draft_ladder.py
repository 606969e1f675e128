# SPDX-License-Identifier: Apache-2.0
"""How many drafts steps may verify, and what a few numbers of them lose."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm.config import VllmConfig
from vllm.config.draft_ladder import draft_ladder
from vllm.config.draft_methods.base import MOST_DRAFTS


@pytest.mark.parametrize(
    ("most", "ladder"),
    [
        (0, (0,)),
        (1, (0, 1)),
        (2, (0, 2)),
        (3, (0, 1, 3)),
        (5, (0, 1, 5)),
        (6, (0, 1, 6)),
        (7, (0, 3, 7)),
        (15, (0, 3, 15)),
    ],
)
def test_one_number_is_between_none_and_all(most: int, ladder: tuple[int, ...]) -> None:
    assert draft_ladder(most) == ladder
    assert draft_ladder(most, full_width=True) == tuple(sorted({0, most}))


@pytest.mark.parametrize(("full_width", "widths"), [(False, (1, 4, 8)), (True, (1, 8))])
def test_widths_are_drafts_and_the_newest_token(full_width: bool, widths: tuple[int, ...]) -> None:
    drafter = SimpleNamespace(full_width=full_width)
    config = cast(Any, SimpleNamespace(tokens_to_verify=8, drafter=drafter))
    assert cast(Any, VllmConfig.step_widths).fget(config) == widths


#: drafts that cost nothing, or a part of a step each, or all together
COSTS = [(0.0, False), (0.05, True), (0.15, True), (0.1, False), (0.3, False)]
SITUATIONS = list(
    itertools.product((0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), (1, 4, 8, 16, 32, 64, 128, 256), COSTS)
)


def worth(drafts: int, acceptance: float, count: int, cost: tuple[float, bool]) -> float:
    """Tokens by time, the weights being read in one unit and 128 tokens computed in another."""
    each, chained = cost
    tokens = sum(acceptance**i for i in range(1 + drafts))
    drafting = each * (drafts if chained else drafts > 0)
    return tokens / (1 + count * (1 + drafts) / 128 + drafting)


def mean_loss(most: int, ladder: tuple[int, ...]) -> float:
    """To the best number up to `most`, in percent."""
    losses = [
        1
        - max(worth(drafts, *situation) for drafts in ladder)
        / max(worth(drafts, *situation) for drafts in range(1 + most))
        for situation in SITUATIONS
    ]
    return 100 * sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("most", "loses", "without"), [(2, 0.7, 0.7), (3, 0.3, 1.9), (7, 2.1, 7.0), (15, 3.15, 13.54)]
)
def test_a_ladder_has_nearly_the_best_number(most: int, loses: float, without: float) -> None:
    assert mean_loss(most, draft_ladder(most)) == pytest.approx(loses, abs=0.05)
    assert mean_loss(most, (0, most)) == pytest.approx(without, abs=0.05)


@pytest.mark.parametrize("most", range(3, 1 + MOST_DRAFTS))
def test_no_other_number_between_is_much_better(most: int) -> None:
    others = [mean_loss(most, (0, between, most)) for between in range(1, most)]
    assert mean_loss(most, draft_ladder(most)) < min(others) + 0.7
