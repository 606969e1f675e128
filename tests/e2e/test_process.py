# SPDX-License-Identifier: Apache-2.0
"""Life and death of a real server: signals, a killed engine, bad starts."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.remote_server import MAIN, RemoteServer
from tests.forked_python import run_python
from tests.ports import free_port
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager")
#: from the signal or the failure to the last process's end; seconds in fact, but machines differ
EXIT_LIMIT_S = 90
LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}


def in_background(server: RemoteServer, body: dict, replies: list) -> threading.Thread:
    def ask() -> None:
        try:
            replies.append(server.http.post("/v1/completions", json=body))
        except httpx.TransportError as error:
            replies.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 60
    while not replies and server.http.get("/load").json()["server_load"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return thread


def gone(processes: list[psutil.Process], timeout_s: float = EXIT_LIMIT_S) -> bool:
    return not psutil.wait_procs(processes, timeout=timeout_s)[1]


def test_sigterm_lets_requests_finish() -> None:
    with RemoteServer(tiny_model("llama"), *FLAGS) as server:
        children, replies = server.children(), []
        assert children
        thread = in_background(server, {**LONG, "max_tokens": 600}, replies)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.log()
        assert "finishing running requests" in server.log()
        thread.join()
        assert replies[0].json()["usage"]["completion_tokens"] == 600
        assert gone(children)


def test_sigint_of_the_whole_group_is_bounded() -> None:
    """As a terminal sends it: to the engine's process too."""
    with RemoteServer(tiny_model("llama"), *FLAGS, "--shutdown-timeout", "1") as server:
        children, replies = server.children(), []
        thread = in_background(server, LONG, replies)
        for process in [server.process, *children]:
            process.send_signal(signal.SIGINT)
        assert server.wait(EXIT_LIMIT_S) == 0, server.log()
        thread.join()
        assert gone(children)


def test_killed_engine_fails_requests_and_ends_the_server() -> None:
    with RemoteServer(tiny_model("llama"), *FLAGS) as server:
        children, replies = server.children(), []
        thread = in_background(server, LONG, replies)
        for process in children:
            process.kill()
        thread.join(EXIT_LIMIT_S)
        assert replies[0].status_code == 500
        assert replies[0].json()["error"]["type"] == "InternalServerError"
        assert server.wait(EXIT_LIMIT_S) != 0
        assert gone(children)


def test_a_server_starts_its_engine_again_if_told_to() -> None:
    """As the same process, which then stops as any other does."""
    flags = (*FLAGS, "--on-failure", "restart")
    with RemoteServer(tiny_model("llama"), *flags, fresh=True) as server:
        replies: list[Any] = []
        thread = in_background(server, LONG, replies)
        dead = server.children()
        for process in dead:
            process.kill()
        thread.join(EXIT_LIMIT_S)
        assert replies[0].status_code == 500
        assert gone(dead)
        deadline = time.monotonic() + 240
        while not server.is_healthy():
            assert server.process.poll() is None and time.monotonic() < deadline, server.log()
            time.sleep(0.1)
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        assert server.post("/v1/completions", **body)["usage"]["completion_tokens"] == 4
        assert "restarting, 1 of at most 3 times an hour" in server.log()
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert gone(children)


def test_killed_server_takes_its_children_along() -> None:
    with RemoteServer(tiny_model("llama"), *FLAGS) as server:
        children = server.children()
        server.process.kill()
        assert gone(children)


def test_what_a_killed_server_leaves_is_removed_by_the_next(short_directory: Path) -> None:
    """No process of it could do so."""
    env = {"VLLM_RPC_BASE_PATH": str(short_directory)}
    with RemoteServer(tiny_model("llama"), *FLAGS, env=env) as server:
        killed = set(short_directory.iterdir())
        os.killpg(server.process.pid, signal.SIGKILL)
        server.wait()
    assert killed
    with RemoteServer(tiny_model("llama"), *FLAGS, env=env) as server:
        assert not killed & set(short_directory.iterdir())
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert list(short_directory.iterdir()) == []


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Its name is short enough for a socket's."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def run_to_failure(*arguments: str) -> tuple[int, str]:
    done = run_python(MAIN, "serve", *arguments, "--port", str(free_port()))
    print(done.stderr)
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reasoning-parser", "no-such-parser"], "no-such-parser"),
        (["--enable-auto-tool-choice"], "--enable-auto-tool-choice"),
        (["--pipeline-parallel-size", "9"], "--pipeline-parallel-size"),
        (["--max-model-len", "1000000"], "max-model-len"),
        (["--chat-template", "/no/such/file"], "/no/such/file"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_flag_is_named_in_the_last_line(flags: list[str], words: str) -> None:
    status, last = run_to_failure(str(tiny_model("llama")), *flags)
    assert status not in (0, None) and words in last.replace("_", "-")


def test_missing_model_is_named_in_the_last_line(tmp_path: Path) -> None:
    status, last = run_to_failure(str(tmp_path / "nothing"))
    assert status == 1 and str(tmp_path / "nothing") in last


def test_failing_engine_start_names_its_cause(tmp_path: Path) -> None:
    """The config is fine, the weights are not: the failure happens in the engine's process."""
    for file in tiny_model("llama").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    status, last = run_to_failure(str(tmp_path))
    assert status == 1 and str(tmp_path) in last


def test_server_module_is_the_same_command(tmp_path: Path) -> None:
    arguments = ["--model", str(tmp_path / "nothing"), "--port", str(free_port())]
    done = run_python("vllm.entrypoints.openai.api_server", *arguments)
    assert done.returncode == 1
    assert str(tmp_path / "nothing") in done.stderr.strip().splitlines()[-1]
