# SPDX-License-Identifier: Apache-2.0
"""What rows verify next, after steps that drafted for some of them and in any number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm.forward_context import ForwardContext
from vllm.kernels.step import Progress
from vllm.v1.spec_decode.draft_loop import DraftLoop, DraftRows

ROWS, DRAFTS = 4, 3
CPU = torch.device("cpu")


@pytest.fixture
def progress() -> Progress:
    found = Progress.create(ROWS, 1 + DRAFTS, CPU)
    found.tokens[:, 0] = torch.tensor([50, 51, 52, 53])
    return found


@pytest.fixture
def loop(progress: Progress) -> DraftLoop:
    return DraftLoop(progress, max_model_len=64)


def rows(*numbers: int) -> DraftRows:
    """A step's requests in these rows, -1 for padding."""
    table, nothing = torch.tensor(numbers), torch.zeros(len(numbers), dtype=torch.int64)
    return DraftRows(table, table >= 0, nothing, nothing, ForwardContext({}, {}))


def drafts(count: int, *first: int) -> list[Tensor]:
    """Of each request so many, that follow on from a first one."""
    return [torch.tensor(first) + i for i in range(count)]


def test_drafts_go_to_their_rows_and_padding_goes_nowhere(
    loop: DraftLoop, progress: Progress
) -> None:
    found = loop.keep(rows(2, 0, -1), drafts(3, 10, 20, 90))
    assert found.tolist() == [[10, 11, 12], [20, 21, 22], [90, 91, 92]]
    assert progress.tokens.tolist() == [
        [50, 20, 21, 22],
        [51, 0, 0, 0],
        [52, 10, 11, 12],
        [53, 0, 0, 0],
    ]
    assert progress.num_drafts.tolist() == [3, 0, 3, 0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_without_a_part_in_the_step_keep_theirs(
    count: int, loop: DraftLoop, progress: Progress
) -> None:
    """In their number: fewer were made for them, or more."""
    loop.keep(rows(0, 1), drafts(2, 10, 20))
    loop.keep(rows(1, 3), drafts(count, 30, 40))
    zeros = [0] * (DRAFTS - count)
    assert progress.num_drafts.tolist() == [2, count, 0, count]
    assert progress.tokens[0].tolist() == [50, 10, 11, 0]
    assert progress.tokens[1].tolist() == [51, *range(30, 30 + count), *zeros]
    assert progress.tokens[3].tolist() == [53, *range(40, 40 + count), *zeros]


def test_after_a_step_that_drafts_nothing_no_row_verifies_any(
    loop: DraftLoop, progress: Progress
) -> None:
    loop.keep(rows(0, 1, 2, 3), drafts(3, 10, 20, 30, 40))
    loop.keep_none()
    assert progress.num_drafts.tolist() == [0] * ROWS
    loop.keep(rows(2), drafts(1, 60))
    assert progress.num_drafts.tolist() == [0, 0, 1, 0]
    assert progress.tokens[:, 1:].tolist() == [[0, 0, 0], [0, 0, 0], [60, 0, 0], [0, 0, 0]]
    assert progress.tokens[:, 0].tolist() == [50, 51, 52, 53]
