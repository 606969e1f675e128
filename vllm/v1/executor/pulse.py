# SPDX-License-Identifier: Apache-2.0
"""A thread that tells once a second where another one is, and whether it goes on."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm.utils.activity import Activity
from vllm.utils.waiting import wait_of, waits_begun

BEAT_S = 1.0
#: a pause of the whole process counts no more than this
LONGEST_BEAT_S = 2 * BEAT_S
_FRAMES = 8
#: what a worker waits for that has nothing to do
NEXT_MESSAGE = "the engine's next message"


@dataclass(frozen=True)
class Beat:
    """Of one thread. `waits_for`: a `Wait` in words; `is_idle`: that is only the next message.
    `still_s`: how long it has waited for that, or, if it waits for nothing that is known here, how
    long its process has used no processor and no disk. `frames`: where it is, innermost first."""

    waits_for: str | None
    is_idle: bool
    still_s: float
    frames: str

    @property
    def is_in_collective(self) -> bool:
        return self.waits_for is not None and not self.is_idle


class Pulse:
    """Calls `tell` with the beats of the thread that makes this, until `stop` or until it raises
    OSError. `alone`: what other processes do that this one has started is not its work."""

    def __init__(self, tell: Callable[[Beat], None], alone: bool = False) -> None:
        self._tell = tell
        self._watched = threading.get_ident()
        self._activity = Activity(os.getpid(), alone)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Nothing is told after this has returned."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        still_s, before_s, before = 0.0, time.monotonic(), (-1, False)
        while not self._stopped.is_set():
            now_s, wait = time.monotonic(), wait_of(self._watched)
            place = waits_begun(self._watched), wait is None
            is_seen = wait is None and self._activity.is_seen(time.thread_time())
            stays = place == before and not is_seen
            still_s = still_s + min(now_s - before_s, LONGEST_BEAT_S) if stays else 0.0
            before_s, before = now_s, place
            is_idle = wait is not None and wait.what == NEXT_MESSAGE
            frames = "" if is_idle else frames_of(self._watched)
            try:
                self._tell(Beat(None if wait is None else str(wait), is_idle, still_s, frames))
            except OSError:
                return
            self._stopped.wait(BEAT_S)


def frames_of(thread: int) -> str:
    """Where a thread is: `file:line function` of its innermost calls."""
    frame = sys._current_frames().get(thread)
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        found.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(found)
