# SPDX-License-Identifier: Apache-2.0
"""Without a GPU the Triton kernels run in the interpreter, which is chosen before their import."""

import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from tests import triton_interpreter

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Every HTTP client would read the machine's certificates, which takes longer than its requests. No
# test needs them.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with slow tests come first: one that came last would keep one worker busy while the
    others have nothing left to do."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Engines collect garbage when they end: they need not look through all imported modules."""
    if "triton.runtime.interpreter" in sys.modules:
        triton_interpreter.make_quicker()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """Commands set variables and the level of the log for their process, which here is that of the
    tests after them too."""
    level = logging.getLogger("vllm").level
    before = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    yield
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)
    logging.getLogger("vllm").setLevel(level)


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core processes are forked although tests that ran before may have left threads: those are
    idle, and a spawned process would import everything again."""
    from vllm.utils import start_method

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(start_method, "_other_threads", list)
