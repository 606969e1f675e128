# SPDX-License-Identifier: Apache-2.0
"""The engine's process that starts before its configuration is known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model

from tests.forked_python import talking_python
from tests.v1.engine.fakes import make_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli import main as cli
from vllm.exceptions import ExplainedError
from vllm.utils.fork_server import fork_server
from vllm.v1.engine import core_proc, spare_process
from vllm.v1.engine.core_messages import CoreAddresses
from vllm.v1.engine.core_process import CoreKilledError, CoreProcess
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.spare_process import SpareProcess, prestarted

pytestmark = pytest.mark.slow


def test_an_engine_runs_in_the_process_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.01")
    with prestarted():
        spare = spare_process._spare
        assert spare is not None
        arguments = EngineArgs(str(tiny_model("llama")), dtype="float32", max_model_len=64)
        engine: Any = LLMEngine.from_engine_args(arguments)
        try:
            assert engine.engine_core.process_id == spare.process.pid
            assert spare_process.take() is None, "there is one, for one engine"
        finally:
            engine.shutdown()
    assert spare.process.exitcode == 0


def test_an_unused_process_ends_with_the_block() -> None:
    with pytest.raises(ValueError, match="bad flag"), prestarted():
        spare = spare_process._spare
        raise ValueError("bad flag")
    assert spare is not None and spare.process.exitcode == -signal.SIGKILL
    assert spare_process.take() is None


def test_a_dead_process_is_not_used() -> None:
    with prestarted():
        spare = spare_process._spare
        assert spare is not None
        spare.process.kill()
        spare.process.join()
        assert spare_process.take() is None


def _answer_environment(work: Connection, ready: Connection) -> None:
    ready.send((os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("LATE"), os.getppid()))


@pytest.mark.usefixtures("forking")
def test_a_replicas_process_is_forked_from_the_fork_server_and_has_devices_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(core_proc, "run_engine_core", _answer_environment)
    with prestarted():
        (_, ready) = connections = spare_process.connections()
        assert ready.poll(60), "the first one, which is forked from this process"
        assert ready.recv() == ("0,1", None, os.getpid())
        with fork_server((), connections):
            monkeypatch.setenv("LATE", "1")
            spare = SpareProcess({"CUDA_VISIBLE_DEVICES": "1"})
            devices, late, parent_pid = spare.ready.recv()
            assert (devices, late) == ("1", "1") and parent_pid != os.getpid()
            spare.discard()
    assert spare_process.connections() == ()


def _is_killed(work: Connection, ready: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leaves(work: Connection, ready: Connection) -> None:
    os._exit(3)


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        (_is_killed, CoreKilledError, "was ended by SIGKILL while starting, as the system does"),
        (_leaves, RuntimeError, r"died while starting \(exit code 3\)"),
    ],
)
def test_how_a_core_that_does_not_start_has_ended(
    target: Callable[..., None],
    kind: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was killed needs no advice on scripts, and no trace of who waited for it."""
    monkeypatch.setattr(core_proc, "run_engine_core", target)
    core = CoreProcess(make_vllm_config(), None, False, CoreAddresses("ipc://a", "ipc://b"))
    with pytest.raises(kind, match=words) as caught:
        core.wait_ready()
    assert isinstance(caught.value, ExplainedError) is (kind is CoreKilledError)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_whose_parent_dies_ends(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", method)
    script = (
        "import os\nfrom vllm.v1.engine.spare_process import SpareProcess\n"
        "if __name__ == '__main__':\n"
        "    print(SpareProcess().process.pid, flush=True)\n    os._exit(0)"
    )
    with talking_python(tmp_path / "parent.py", script) as (_, output):
        assert any(line.strip().isdigit() for line in output), "the process was started"
        output.read()  # its end of the pipe is what keeps the output open


@pytest.mark.parametrize(
    ("name", "argv", "starts"),
    [
        ("serve", ["m", "--port", "1"], True),
        ("serve", ["m", "--help=all"], False),
        ("serve", ["-h"], False),
        ("collect-env", [], False),
    ],
)
def test_only_a_server_starts_one(
    monkeypatch: pytest.MonkeyPatch, name: str, argv: list[str], starts: bool
) -> None:
    class Started(Exception):
        pass

    def start(self: SpareProcess) -> None:
        raise Started

    monkeypatch.setattr(SpareProcess, "__init__", start)
    try:
        with cli._engine_process(name, argv):
            assert not starts
    except Started:
        assert starts


def test_it_imports_nothing_heavy() -> None:
    script = "import sys, vllm.v1.engine.spare_process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["False"]
