# SPDX-License-Identifier: Apache-2.0
"""What an executor has asked its workers, until they have answered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from vllm.v1.executor.worker_process import Answer


class Question:
    """A message to all workers, and the answers of those that give one.

    `combine` makes the future's result of their values, in rank order.
    """

    def __init__(self, ranks: range, combine: Callable[[list[Any]], Any] = list) -> None:
        self.ranks = ranks
        self.future: Future[Any] = Future()
        self._combine = combine
        self._answers: dict[int, Answer] = {}

    def answered(self, rank: int, answer: Answer) -> None:
        """Once all have answered, the future has its result or the first error."""
        self._answers[rank] = answer
        if len(self._answers) < len(self.ranks):
            return
        answers = [self._answers[rank] for rank in self.ranks]
        try:
            for one in answers:
                if one.error is not None:
                    raise one.error
            result = self._combine([one.value for one in answers])
        except Exception as error:
            self.failed(error)
            return
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(result)

    def failed(self, error: Exception) -> None:
        """Unless it has a result already, which another thread may be setting."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)
