# SPDX-License-Identifier: Apache-2.0
"""The clock by which workers that hang are found and ended, faster than it is for users."""

from __future__ import annotations

import pytest

from vllm.utils import silence
from vllm.v1.engine import client_link, core_proc, core_process
from vllm.v1.executor import hang_watch, node, pulse, remote_workers, stationed

#: instead of 20 s; more than the three beats after which a silent process is looked at, and more
#: than a machine may stop any process for
LIMIT_S = 3.0
#: of each module that names one
_TIMES = {"BEAT_S": silence.BEAT_S / 2}
_TIMES |= {"LONGEST_LOOK_S": silence.LONGEST_LOOK_S / 2, "SILENT_S": silence.SILENT_S / 2}
_TIMES |= {"HANG_S": LIMIT_S}
_MODULES = (silence, client_link, core_proc, core_process, hang_watch, node, pulse, remote_workers)


def end_soon(patch: pytest.MonkeyPatch) -> None:
    """Workers that cannot stop by themselves are killed this soon after a failure. Who has failed,
    and why, is known by then."""
    for module in (stationed, node):
        patch.setattr(module, "LAST_WORDS_S", 0.2)


def use_quick_clock(patch: pytest.MonkeyPatch) -> None:
    """Beats and looks come twice as often, in this process and in those that are forked from now
    on."""
    for module in _MODULES:
        for name, seconds in _TIMES.items():
            if name in vars(module):
                patch.setattr(module, name, seconds)
