# SPDX-License-Identifier: Apache-2.0
"""How dead processes are spoken of."""

from __future__ import annotations

import signal

import pytest

from vllm.utils.exit_status import ending_signal, how_it_ended


@pytest.mark.parametrize(
    ("exitcode", "name", "words"),
    [
        (-signal.SIGKILL, "SIGKILL", "SIGKILL"),
        (-40, "signal 40", "signal 40"),
        (0, None, "exit code 0"),
        (3, None, "exit code 3"),
        (None, None, "exit code None"),
    ],
)
def test_how_a_process_ended(exitcode: int | None, name: str | None, words: str) -> None:
    assert ending_signal(exitcode) == name
    assert how_it_ended(exitcode) == words
