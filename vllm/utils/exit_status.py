# SPDX-License-Identifier: Apache-2.0
"""How a process ended, in words: messages about dead processes say it alike."""

from __future__ import annotations

import signal


def ending_signal(exitcode: int | None) -> str | None:
    """What ended a process with this exit code of `multiprocessing`: `SIGKILL`, or `signal 40` for
    one without a name. None where no signal did, or nobody knows yet (None)."""
    if exitcode is None or exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:  # those between SIGRTMIN and SIGRTMAX
        return f"signal {-exitcode}"


def how_it_ended(exitcode: int | None) -> str:
    """The signal, or `exit code 1`."""
    return ending_signal(exitcode) or f"exit code {exitcode}"
