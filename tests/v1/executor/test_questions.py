# SPDX-License-Identifier: Apache-2.0
"""Answers of several workers become one."""

from __future__ import annotations

import pytest

from vllm.v1.executor.stationed import Question
from vllm.v1.executor.worker_process import Answer


def test_values_are_combined_in_the_order_of_the_ranks() -> None:
    question = Question(range(3, 6), combine=tuple)
    for rank in (4, 3, 5):
        assert not question.future.done()
        question.answered(rank, Answer(rank * 10))
    assert question.future.result() == (30, 40, 50)


def test_the_first_error_is_the_result() -> None:
    question = Question(range(2))
    question.answered(1, Answer(error=ValueError("later")))
    question.answered(0, Answer(error=KeyError("first")))
    with pytest.raises(KeyError, match="first"):
        question.future.result()


def test_what_cannot_be_combined_is_an_error() -> None:
    question = Question(range(1), combine=lambda values: values[1])
    question.answered(0, Answer(1))
    with pytest.raises(IndexError):
        question.future.result()


@pytest.mark.parametrize("answer", [Answer(1), Answer(error=ValueError("late"))])
def test_a_result_stays(answer: Answer) -> None:
    """A step that is overdue fails on one thread while its answer arrives on another."""
    question = Question(range(1))
    question.failed(TimeoutError("overdue"))
    question.answered(0, answer)
    question.failed(RuntimeError("shut down"))
    with pytest.raises(TimeoutError, match="overdue"):
        question.future.result()
