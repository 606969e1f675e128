# SPDX-License-Identifier: Apache-2.0
"""When the phases of a start begin and end: for the log, and for `vllm bench startup`.

A phase may begin in one process and end in another: the clock is the machine's. Every process
keeps its events, and appends them to the file named by VLLM_STARTUP_PHASES if that is set.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from vllm import envs
from vllm.logger import init_logger
from vllm.utils.imports import missing_bytecode
from vllm.utils.phase_ledger import PhaseEvent, ledger

logger = init_logger(__name__)

#: a start begins with this phase, or where everything is imported with the next one
IMPORT = "import"
FIRST_OF_ENGINE = "config"

_events: list[PhaseEvent] = []


def begin(name: str, time_s: float | None = None) -> None:
    """The phase begins now, or began at `time_s` of `time.monotonic()`."""
    again = name == FIRST_OF_ENGINE and any(event.name == name for event in _events)
    if again or name == IMPORT:
        _events.clear()  # an earlier start of this process failed
    _append(PhaseEvent(name, True, time.monotonic() if time_s is None else time_s))


def end(name: str) -> None:
    """The phase ends now."""
    _append(PhaseEvent(name, False, time.monotonic()))


def begin_with_process(name: str) -> None:
    """The phase began when this process did."""
    import psutil

    age_s = time.time() - psutil.Process().create_time()
    begin(name, time.monotonic() - age_s)


@contextmanager
def startup_phase(name: str) -> Iterator[None]:
    """The phase lasts as long as the block, or as the function that this decorates."""
    begin(name)
    try:
        yield
    finally:
        end(name)


def began_s() -> float:
    """When the start that is under way began, on `time.monotonic()`'s clock."""
    return min((event.time_s for event in _events), default=time.monotonic())


def take_events() -> list[PhaseEvent]:
    """What this process noted and adopted since the last call."""
    taken = _events.copy()
    _events.clear()
    return taken


def adopt(events: Iterable[PhaseEvent]) -> None:
    """Add what another process noted; its file has it already."""
    _events.extend(events)


def log_ledger() -> None:
    """Log where the time of this start went, in seconds, from its first phase until now."""
    events = sorted(take_events(), key=lambda event: event.time_s)
    if not events:
        return
    now = time.monotonic()
    began = events[0].time_s
    parts = ledger(events, began, now).items()
    shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts)
    logger.info("engine started in %.2f s: %s", now - began, shown)
    if (why := missing_bytecode()) is not None:
        logger.warning(
            "every start compiles all Python modules, for seconds (%s); `python -m compileall` "
            "does it once",
            why,
        )


def _append(event: PhaseEvent) -> None:
    _events.append(event)
    path = envs.VLLM_STARTUP_PHASES
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            line = {"name": event.name, "begins": event.begins, "time_s": event.time_s}
            file.write(json.dumps(line) + "\n")
