# SPDX-License-Identifier: Apache-2.0
"""Interrupts of commands that still import: nothing is printed, and nothing runs on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from vllm.utils.interrupts import interrupts_end, interrupts_raise

MAIN = "vllm.entrypoints.cli.main"
#: of a command that a test starts
LIMIT_S = 60.0


def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A fresh interpreter in a session of its own. It does not ignore interrupts, as what a shell
    runs in the background does."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end(command: subprocess.Popen[str]) -> str:
    """What it has printed; all who could have printed more are gone."""
    try:
        return command.communicate(timeout=LIMIT_S)[0]
    finally:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)


@pytest.mark.parametrize("command", [["serve", "a-model"], ["bench", "serve", "--model", "m"]])
def test_an_interrupt_that_python_would_drop_ends_a_command(
    command: list[str], tmp_path: Path
) -> None:
    """It comes in a finaliser while modules are imported."""
    module = """
        import os, signal, time
        class Dropped:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
        Dropped()
        time.sleep(600)
    """
    for name in ("transformers", "httpx"):  # what a server imports first, and what clients do
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(module))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = begin("-m", MAIN, *command, PYTHONPATH=path)
    assert end(started) == "" and started.returncode == 130


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_interrupt_of_all_processes_of_a_start(method: str) -> None:
    """As a terminal sends it, once there is a process for the engine."""
    started = begin("-m", MAIN, "serve", "a-model", VLLM_WORKER_MULTIPROC_METHOD=method)
    process, deadline = psutil.Process(started.pid), time.monotonic() + LIMIT_S
    while not (children := process.children()):
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(started.pid, signal.SIGINT)
    assert end(started) == "" and started.returncode == 130
    assert not psutil.wait_procs(children, LIMIT_S)[1]


def test_nothing_is_imported_before_a_command_takes_its_interrupts() -> None:
    code = f"import sys, {MAIN}; print(*(m for m in sys.modules if m.startswith('vllm')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    helpers = ["vllm", "vllm.version", "vllm.entrypoints", "vllm.entrypoints.cli"]
    helpers += ["vllm.utils", "vllm.utils.interrupts"]
    assert sorted(done.stdout.split()) == sorted([*helpers, MAIN])


def test_a_command_that_has_begun_gets_exceptions() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts_end():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            interrupts_raise()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_whoever_ignores_interrupts_goes_on_to_do_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_end():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
