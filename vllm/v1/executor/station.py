# SPDX-License-Identifier: Apache-2.0
"""Some of an executor's workers, which are reached in one way: on this host, or on another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

from vllm.exceptions import ExplainedError


class WorkerDiedError(ExplainedError, RuntimeError):
    """A worker, or a host with workers, ended by itself. `was_killed`: not by an error of its own,
    so that it explains what others say at that time."""

    def __init__(self, message: str, was_killed: bool = True) -> None:
        super().__init__(message)
        self.was_killed = was_killed

    def __reduce__(self) -> tuple[type[WorkerDiedError], tuple[str, bool]]:
        return type(self), (str(self), self.was_killed)


def failure_of(error: BaseException) -> str | None:
    """What others are told of an error that ends the engine; None for a stop that was asked for."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return None
    return str(error) or type(error).__name__


class Source(Protocol):
    """A file that becomes readable when an answer or the end of a worker can be taken."""

    def fileno(self) -> int: ...


class Station(ABC):
    """Workers of consecutive ranks. Messages are sent by one thread at a time; one thread takes."""

    ranks: range
    #: where they are, for errors; empty: here
    name = ""

    @abstractmethod
    def send(self, message: bytes, check: Callable[[], None]) -> None:
        """A pickled `(Kind, content)` to each worker. While it cannot be sent, waits and calls
        `check`, which raises when waiting is of no use any more."""

    @property
    @abstractmethod
    def sources(self) -> list[Source]:
        """What to wait for."""

    @abstractmethod
    def take(self, source: Source) -> Iterable[tuple[int, bytes]]:
        """(Rank, pickled `Answer`)s that a readable source has. `WorkerDiedError` after the last
        one of a worker that is gone: the source has no more."""

    @abstractmethod
    def slow_ranks(self) -> list[int]:
        """Workers that do not go on, as far as that can be seen."""

    @abstractmethod
    def sees_work(self, rank: int) -> bool | None:
        """Whether a worker has done something since the last question, as far as that can be seen
        without its help; None where nothing can be seen."""

    @abstractmethod
    def begin_end(self, reason: str | None) -> None:
        """Tell the workers to stop, because of a failure if there is a `reason`. Does not wait."""

    @abstractmethod
    def finish_end(self, deadline: float) -> None:
        """Wait until they have stopped or it is `deadline` (of `time.monotonic`), then end them."""

    @abstractmethod
    def close(self) -> None:
        """Release what is left; nobody sends or takes any more."""
