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
        (2, (0, 1, 2)),
        (3, (0, 1, 3)),
        (4, (0, 1, 2, 4)),
        (5, (0, 1, 2, 5)),
        (7, (0, 1, 3, 7)),
        (15, (0, 1, 3, 7, 15)),
    ],
)
def test_each_number_makes_a_step_half_as_wide_as_the_next(
    most: int, ladder: tuple[int, ...]
) -> None:
    assert draft_ladder(most) == ladder


def test_widths_are_drafts_and_the_newest_token() -> None:
    config = cast(Any, SimpleNamespace(tokens_to_verify=8))
    assert cast(Any, VllmConfig.step_widths).fget(config) == (1, 2, 4, 8)


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


@pytest.mark.parametrize("most", range(1, 1 + MOST_DRAFTS))
def test_a_ladder_has_nearly_the_best_number(most: int) -> None:
    losses = []
    for situation in SITUATIONS:
        best = max(worth(drafts, *situation) for drafts in range(1 + most))
        losses.append(1 - max(worth(drafts, *situation) for drafts in draft_ladder(most)) / best)
    assert max(losses) < 0.04 and sum(losses) / len(losses) < 0.0061


@pytest.mark.parametrize(("most", "lost"), [(3, 0.13), (7, 0.268), (15, 0.421)])
def test_none_and_all_lose_more(most: int, lost: float) -> None:
    losses = [
        1
        - max(worth(drafts, *situation) for drafts in (0, most))
        / max(worth(drafts, *situation) for drafts in range(1 + most))
        for situation in SITUATIONS
    ]
    assert max(losses) == pytest.approx(lost, abs=0.001)
