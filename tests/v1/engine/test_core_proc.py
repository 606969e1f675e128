# SPDX-License-Identifier: Apache-2.0
"""The loop of the core process around signals."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from vllm.exceptions import HangError
from vllm.v1.engine.core_messages import CoreAddresses
from vllm.v1.engine.core_proc import EngineCoreProc, _run


class IdleCore:
    """A core that never has work."""

    only_waits = False
    joint = None

    def __init__(self):
        self.failure_callbacks = []
        self.executor = SimpleNamespace(register_failure_callback=self.failure_callbacks.append)
        self.vllm_config = SimpleNamespace(decisions=SimpleNamespace(current=nullcontext))
        self.ends = []

    def has_work(self):
        return False

    def use_idle_time(self):
        return False

    def abort_requests(self, request_ids):
        pass

    def shutdown(self, reason=None):
        self.ends.append(reason)


def test_a_signal_that_does_not_interrupt_the_wait_still_ends_the_loop(tmp_path):
    """A signal that arrives between Python's check and the wait, or at another thread, leaves the
    main thread asleep; so does one raised in a thread here."""
    addresses = CoreAddresses(f"ipc://{tmp_path}/requests", f"ipc://{tmp_path}/outputs")
    proc = EngineCoreProc(IdleCore(), addresses)
    previous = signal.signal(signal.SIGTERM, lambda *_: proc.request_shutdown())

    def raise_in_this_thread():
        time.sleep(0.3)
        signal.raise_signal(signal.SIGTERM)

    # Wakes the loop if it does not end by itself, so that the test fails instead of hanging.
    rescued = threading.Event()
    rescue = threading.Timer(20, lambda: (rescued.set(), proc.request_shutdown()))
    threading.Thread(target=raise_in_this_thread).start()
    rescue.start()
    try:
        proc.run()
    finally:
        rescue.cancel()
        signal.signal(signal.SIGTERM, previous)
    assert not rescued.is_set()


def test_workers_that_end_while_the_core_is_idle_end_it(tmp_path):
    addresses = CoreAddresses(f"ipc://{tmp_path}/requests", f"ipc://{tmp_path}/outputs")
    core = IdleCore()
    proc = EngineCoreProc(core, addresses)
    (failed,) = core.failure_callbacks
    threading.Timer(0.1, failed, [RuntimeError("a worker died")]).start()
    rescue = threading.Timer(20, proc.request_shutdown)
    rescue.start()
    try:
        with pytest.raises(RuntimeError, match="a worker died"):
            proc.run()
    finally:
        rescue.cancel()


@pytest.mark.parametrize("is_orphan", [False, True])
def test_an_end_without_a_parent_is_no_stop(tmp_path, is_orphan):
    """Hosts that were told of a stop would say that all is well, and not be started again."""
    addresses = CoreAddresses(f"ipc://{tmp_path}/requests", f"ipc://{tmp_path}/outputs")
    core = IdleCore()
    proc = EngineCoreProc(core, addresses)
    proc.request_shutdown()
    _run(core, proc, SimpleNamespace(is_gone=is_orphan))
    assert core.ends == ["the process of the API is gone" if is_orphan else None]


def ends_after(error, tmp_path):
    """What a core whose executor fails with `error` tells others of its end."""
    addresses = CoreAddresses(f"ipc://{tmp_path}/requests", f"ipc://{tmp_path}/outputs")
    core = IdleCore()
    proc = EngineCoreProc(core, addresses)
    core.failure_callbacks[0](error)
    with pytest.raises(SystemExit):
        _run(core, proc, SimpleNamespace(is_gone=False))
    return core.ends


def test_an_error_of_the_core_is_no_stop(tmp_path):
    assert ends_after(KeyError("block"), tmp_path) == ["KeyError: 'block'"]


def test_an_error_that_explains_itself_has_no_trace(tmp_path, caplog):
    hang = "the worker of rank 1 does not go on"
    assert ends_after(HangError(hang), tmp_path) == [hang]
    assert "the engine core failed: the worker of rank 1 does not go on" in caplog.text
    assert "Traceback" not in caplog.text
