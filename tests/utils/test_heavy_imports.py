# SPDX-License-Identifier: Apache-2.0
"""The imports that a start waits for: once where a process can be forked, else in both at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: prints what is imported when the process starts, and once it has
_SCRIPT = """
import sys, threading
from vllm.utils import spare_process

heavy = ("transformers", "torch", "vllm.config", "vllm.v1.engine.core", "triton")

def start(self):
    print(sorted(set(heavy) & set(sys.modules)))
    assert threading.enumerate() == [threading.main_thread()]

spare_process.SpareProcess.__init__ = start
spare_process.take = lambda: None
with spare_process.prestarted():
    print(sorted(set(heavy) & set(sys.modules)))
"""

_HEAVY = ["torch", "transformers", "vllm.config"]


@pytest.mark.parametrize(("method", "before"), [("fork", _HEAVY), ("spawn", [])])
def test_only_a_process_that_is_forked_waits_for_the_imports(
    method: str, before: list[str]
) -> None:
    """It has them from its parent; one that is spawned imports them itself, at the same time."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=os.environ | {"VLLM_WORKER_MULTIPROC_METHOD": method},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert done.stdout.splitlines() == [str(before), str(_HEAVY)]
