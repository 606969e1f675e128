# SPDX-License-Identifier: Apache-2.0
"""`--on-failure restart`: after a failure the same command runs anew, in the same process.

The process is replaced (exec), so that nothing of the failed engine is left in it, while its id
stays that which a service manager knows. Its environment tells when it was restarted before.
"""

from __future__ import annotations

import os
import sys
import time

from vllm import envs
from vllm.logger import init_logger

logger = init_logger(__name__)

MOST_RESTARTS = 3
WITHIN_S = 3600.0
_stop_asked = False


def note_stop() -> None:
    """A signal has asked this process to stop: whatever fails from now on, it does not restart."""
    global _stop_asked
    _stop_asked = True


def restart() -> None:
    """Run this process's command anew. Returns only if the process was asked to stop, or has been
    restarted `MOST_RESTARTS` times within `WITHIN_S`."""
    if _stop_asked:
        return
    now = time.time()
    restarts = recent(envs.VLLM_RESTARTS, now)
    if len(restarts) >= MOST_RESTARTS:
        logger.error("restarted %d times within an hour: stopping", len(restarts))
        return
    logger.warning("restarting, %d of at most %d times an hour", len(restarts) + 1, MOST_RESTARTS)
    os.environ["VLLM_RESTARTS"] = ",".join(map(str, [*restarts, now]))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def recent(times: str, now: float) -> list[float]:
    """Those of `times`, seconds with commas between, that are within `WITHIN_S` before `now`."""
    return [t for t in map(float, filter(None, times.split(","))) if now - t < WITHIN_S]
