# SPDX-License-Identifier: Apache-2.0
"""Every automatic choice is a record: logged once, listed at `GET /decisions`, `vllm explain`.

An engine has a log of its own, `VllmConfig.decisions`. `record` writes to the log that is current
on this thread: the engine's while its configuration is made and while its core and workers work,
else the log of the process, which every listing includes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field

from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True)
class Decision:
    """`what` was decided, the value `chosen`, `why`, and what it was chosen `instead_of`."""

    what: str
    chosen: str
    why: str
    instead_of: str | None = None


_lock = threading.Lock()


@dataclass
class DecisionLog:
    """The records of one engine, or of the process; a copied or pickled log has its own.

    `is_logged`: not for an engine that is only considered.
    """

    _records: dict[str, Decision] = field(default_factory=dict)
    is_logged: bool = True

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let `record` write here on this thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def record(
        self, what: str, chosen: object, why: str, instead_of: object | None = None
    ) -> Decision:
        """Record a choice; the same choice is logged once, a changed one replaces the older."""
        rejected = None if instead_of is None else str(instead_of)
        decision = Decision(what, str(chosen), why, rejected)
        with _lock:
            known = self._records.get(what)
            self._records[what] = decision
        if self.is_logged and known != decision:
            instead = f" instead of {rejected}" if rejected else ""
            logger.info("%s: %s%s (%s)", what, decision.chosen, instead, why)
        return decision

    def adopt(self, decisions: list[Decision]) -> None:
        """Add records made in another process without logging them again."""
        with _lock:
            self._records.update((decision.what, decision) for decision in decisions)

    def decisions(self) -> list[Decision]:
        """The records of the process and of this log, which are stronger, in the order in which
        they were first made."""
        with _lock:
            return list({**PROCESS._records, **self._records}.values())

    def as_dicts(self) -> list[dict[str, str | None]]:
        """The records in JSON form."""
        return [asdict(d) for d in self.decisions()]

    def clear(self) -> None:
        """Forget every record of this log."""
        with _lock:
            self._records.clear()


#: choices that hold for the whole process (its device, kernels for it, its limits), and those made
#: outside any engine
PROCESS = DecisionLog()
_current: ContextVar[DecisionLog] = ContextVar("decisions", default=PROCESS)


def record(what: str, chosen: object, why: str, instead_of: object | None = None) -> Decision:
    """Record a choice in the current log."""
    return _current.get().record(what, chosen, why, instead_of)


def decisions() -> list[Decision]:
    """The records of the current log and of the process."""
    return _current.get().decisions()


def clear() -> None:
    """Forget every record of the current log."""
    _current.get().clear()
