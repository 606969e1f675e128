# SPDX-License-Identifier: Apache-2.0
"""Without a GPU the Triton kernels run in the interpreter, which is chosen before their import."""

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from tests import triton_interpreter

# Every HTTP client would read the machine's certificates, which takes longer than its requests. No
# test needs them.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull

#: of variables that a test leaves as they were
_SETTINGS = ("VLLM_", "OMP_", "MKL_")
#: what the collector looks through in a few milliseconds
_MOST_OBJECTS = 20_000


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands out tests to others imports no torch, for which they would wait:
    nor do the conftest files that are read before this."""
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return
    # What is imported and collected stays; to look through it again and again takes seconds.
    gc.disable()
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    _make_examples_repeatable()


def _make_examples_repeatable() -> None:
    """Property tests take the same examples every time, however long one takes.
    `--hypothesis-profile default` draws new ones."""
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=slow)
    settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random tensors do not depend on which tests this process has run before."""
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # Without it `torch.manual_seed` keeps the stack, as text, for when there will be one.
        torch.default_generator.manual_seed(0)


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
    gc.enable()


@contextlib.contextmanager
def _kept_settings() -> Iterator[None]:
    """Commands set variables and the level of the log for their process, which here is that of the
    tests after them too; so do libraries when they are imported or used."""
    logger = logging.getLogger("vllm")
    level = logger.level
    before = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    yield
    for name in [name for name in os.environ if name.startswith(_SETTINGS)]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)
    if logger.level != level:
        # Which makes every logger of the process forget what it knows.
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    with _kept_settings():
        yield


@pytest.fixture(autouse=True, scope="module")
def _own_settings_of_a_module() -> Iterator[None]:
    """What fixtures of the module change, which are made before those of its first test."""
    with _kept_settings():
        yield


@pytest.fixture(autouse=True, scope="module")
def _little_to_look_through() -> Iterator[None]:
    """What a module leaves behind, imported modules, parsed sources and caches, stays: every engine
    that ends would look through all of it for garbage."""
    yield
    if len(gc.get_objects()) > _MOST_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture
def own_stream() -> Iterator[None]:
    """On a GPU the test runs on a stream that is not the default one, as a worker does: what
    launches share is then there when the test captures them on the current stream."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core processes are forked although tests that ran before may have left threads: those are
    idle, and a spawned process would import everything again."""
    from vllm.utils import start_method

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setattr(start_method, "_other_threads", list)
