# SPDX-License-Identifier: Apache-2.0
"""Every automatic choice is a record: logged once, listed at `GET /decisions`, `vllm explain`."""

import threading
from dataclasses import asdict, dataclass

from vllm.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True)
class Decision:
    """`what` was decided, the value `chosen`, `why`, and what it was chosen `instead_of`."""

    what: str
    chosen: str
    why: str
    instead_of: str | None = None


_decisions: dict[str, Decision] = {}
_lock = threading.Lock()


def record(what: str, chosen: object, why: str, instead_of: object | None = None) -> Decision:
    """Record a choice; the same choice is logged once, a changed one replaces the older."""
    decision = Decision(what, str(chosen), why, None if instead_of is None else str(instead_of))
    with _lock:
        known = _decisions.get(what)
        _decisions[what] = decision
    if known != decision:
        rejected = f" instead of {decision.instead_of}" if decision.instead_of else ""
        logger.info("%s: %s%s (%s)", what, decision.chosen, rejected, why)
    return decision


def adopt(decisions: list[Decision]) -> None:
    """Add records made in another process without logging them again."""
    with _lock:
        for decision in decisions:
            _decisions[decision.what] = decision


def decisions() -> list[Decision]:
    """All records of this process in the order they were first made."""
    with _lock:
        return list(_decisions.values())


def as_dicts() -> list[dict[str, str | None]]:
    """The records in JSON form."""
    return [asdict(d) for d in decisions()]


def clear() -> None:
    """Forget every record (a new engine in the same process starts clean)."""
    with _lock:
        _decisions.clear()
