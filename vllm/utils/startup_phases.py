# SPDX-License-Identifier: Apache-2.0
"""When the phases of a start begin and end, for `vllm bench startup`.

Every process of a server appends to the file named by VLLM_STARTUP_PHASES; unset, nothing happens.
A phase may begin in one process and end in another: the clock is the machine's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vllm import envs


def begin(name: str) -> None:
    """The phase begins now."""
    _append(name, True)


def end(name: str) -> None:
    """The phase ends now."""
    _append(name, False)


@contextmanager
def startup_phase(name: str) -> Iterator[None]:
    """The phase lasts as long as the block, or as the function that this decorates."""
    begin(name)
    try:
        yield
    finally:
        end(name)


def _append(name: str, begins: bool) -> None:
    path = envs.VLLM_STARTUP_PHASES
    if path is not None:
        event = {"name": name, "begins": begins, "time_s": time.monotonic()}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
