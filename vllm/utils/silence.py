# SPDX-License-Identifier: Apache-2.0
"""How long a process of this machine has neither said nor done anything."""

from __future__ import annotations

import time

from vllm import envs
from vllm.utils.activity import Activity, Scope

#: how often a process, or a thread, says that it goes on
BEAT_S = 1.0
#: how long it may say and do nothing, unless `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS` allows more
LIMIT_S = 20.0
#: a pause of whoever listens counts no more than this
LONGEST_LOOK_S = 2 * BEAT_S
#: who has said nothing for this long may not run
SILENT_S = 3 * BEAT_S


class Silence:
    """Of one process. To say something needs Python, which a long call into a library may keep to
    itself: who is seen to work goes on without a word."""

    def __init__(self, pid: int) -> None:
        self._activity = Activity(pid, Scope.PROCESS)
        self._silent_s = 0.0
        self._looked_s = time.monotonic()

    def end(self) -> None:
        """It has said something."""
        self._silent_s = 0.0

    def look(self) -> str | None:
        """What is wrong with the process, at most a second after the last look; None as long as it
        may go on."""
        now_s = time.monotonic()
        self._silent_s += min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        if self._silent_s > SILENT_S and self._activity.is_seen():
            self._silent_s = 0.0
        limit_s = max(LIMIT_S, envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS or 0.0)
        if self._silent_s < limit_s:
            return None
        return (
            f"says nothing and does nothing for {limit_s:g} s "
            "(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS allows more): it was stopped, or hangs"
        )
