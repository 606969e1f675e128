# SPDX-License-Identifier: Apache-2.0
"""The clock by which workers that hang are found, twice as fast: their beats, and looks at them."""

from __future__ import annotations

import pytest

from vllm.utils import silence
from vllm.v1.engine import client_link, core_proc, core_process
from vllm.v1.executor import hang_watch, node, pulse, remote_workers

#: instead of 20 s; more than the three beats after which a silent process is looked at, and more
#: than a machine may stop any process for
LIMIT_S = 2.5
#: of each module that names one
_TIMES = {"BEAT_S": silence.BEAT_S / 2}
_TIMES |= {"LONGEST_LOOK_S": silence.LONGEST_LOOK_S / 2, "SILENT_S": silence.SILENT_S / 2}
_TIMES |= {"HANG_S": LIMIT_S}
_MODULES = (silence, client_link, core_proc, core_process, hang_watch, node, pulse, remote_workers)


def use_quick_clock(patch: pytest.MonkeyPatch) -> None:
    """In this process, and in those that are forked from now on."""
    for module in _MODULES:
        for name, seconds in _TIMES.items():
            if hasattr(module, name):
                patch.setattr(module, name, seconds)
