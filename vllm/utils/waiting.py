# SPDX-License-Identifier: Apache-2.0
"""What the threads of this process wait for that others have to do, for whoever looks for hangs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """`number`: how many this thread had begun. `what`: a collective, or other words that complete
    "waits for"; `ranks`: whose it is, if that matters."""

    number: int
    what: str
    ranks: Sequence[int] = ()

    def __str__(self) -> str:
        among = f" of ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.what}{among}"


_waits: dict[int, Wait] = {}
_numbers: dict[int, int] = {}


class waiting_for:
    """Inside the block this thread waits for others: for `what` of `ranks`."""

    __slots__ = ("_before", "_ranks", "_thread", "_what")

    def __init__(self, what: str, ranks: Sequence[int] = ()) -> None:
        self._what, self._ranks = what, ranks

    def __enter__(self) -> None:
        thread = self._thread = threading.get_ident()
        number = _numbers[thread] = _numbers.get(thread, 0) + 1
        self._before = _waits.get(thread)
        _waits[thread] = Wait(number, self._what, self._ranks)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del _waits[self._thread]
        else:
            _waits[self._thread] = self._before


def wait_of(thread: int) -> Wait | None:
    """What the thread of that identifier waits for."""
    return _waits.get(thread)


def waits_begun(thread: int) -> int:
    """How often the thread has begun to wait."""
    return _numbers.get(thread, 0)
