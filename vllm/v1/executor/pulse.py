# SPDX-License-Identifier: Apache-2.0
"""A thread that tells once a second where another one is, and whether it goes on."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm.utils.activity import Activity, Scope
from vllm.utils.silence import BEAT_S, LONGEST_LOOK_S
from vllm.utils.waiting import wait_of, waits_begun

_FRAMES = 8
#: as `faulthandler` writes it
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
#: what a worker waits for that has nothing to do
NEXT_MESSAGE = "the engine's next message"


@dataclass(frozen=True)
class Beat:
    """Of one thread. `waits_for`: a `Wait` in words; `is_idle`: that is only the next message.
    `still_s`: how long it has waited for that, or, if it waits for nothing that is known here, how
    long its process has used no processor and no disk. `frames`: where it is, innermost first;
    empty as long as it comes and goes."""

    waits_for: str | None
    is_idle: bool
    still_s: float
    frames: str

    @property
    def is_in_collective(self) -> bool:
        return self.waits_for is not None and not self.is_idle


class Pulse:
    """Calls `tell` with the beats of the thread that makes this, until `stop` or until it raises
    OSError. `alone`: what other threads and processes do is not its work."""

    def __init__(self, tell: Callable[[Beat], None], alone: bool = False) -> None:
        self._tell = tell
        self._watched = threading.get_ident()
        scope = Scope.THREAD if alone else Scope.FAMILY
        self._idle_s = (lambda: 0.0) if alone else time.thread_time
        self._activity = Activity(os.getpid(), scope, threading.get_native_id())
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
            stays = place == before
            is_still = stays and not (wait is None and self._activity.is_seen(self._idle_s()))
            still_s = still_s + min(now_s - before_s, LONGEST_LOOK_S) if is_still else 0.0
            before_s, before = now_s, place
            is_idle = wait is not None and wait.what == NEXT_MESSAGE
            frames = frames_of(self._watched) if stays and not is_idle else ""
            try:
                self._tell(Beat(None if wait is None else str(wait), is_idle, still_s, frames))
            except OSError:
                return
            self._stopped.wait(BEAT_S)


def frames_of(thread: int) -> str:
    """Where a thread is: `file:line function` of its innermost calls.

    Not by `sys._current_frames`: before Python 3.11.9 a collection inside of it may let another
    thread run that then waits for ever for its lock, and keeps the interpreter to itself. Empty
    where no file can be made.
    """
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    own = re.search(rf"hread 0x0*{thread:x} .*\n((?:  File .*\n)*)", text)
    calls = [] if own is None else _CALL.findall(own[1])[:_FRAMES]
    return " < ".join(f"{Path(name).name}:{line} {function}" for name, line, function in calls)
