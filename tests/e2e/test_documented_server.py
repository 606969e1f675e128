# SPDX-License-Identifier: Apache-2.0
"""What the documentation says to send to a running server, sent as it stands there."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, Command, documented_commands, python_blocks
from tests.e2e.remote_server import RemoteServer
from vllm.entrypoints.cli.main import main as vllm

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MODEL = "examples/models/tiny-qwen3_5-code"
COMMANDS = documented_commands()
CURLS = [command for command in COMMANDS if command.words[0] == "curl"]
BENCHES = [c for c in COMMANDS if c.words[:3] == ("vllm", "bench", "serve") and len(c.words) > 3]
CLIENT_BLOCKS = [
    block for block in python_blocks(ROOT / "docs" / "clients.md") if "localhost:8000" in block
]
LIBRARY_BLOCKS = [
    block
    for page in (ROOT / "README.md", ROOT / "docs" / "clients.md")
    for block in python_blocks(page)
    if "LLM(" in block
]


@pytest.fixture(scope="module")
def server() -> Iterator[RemoteServer]:
    flags = ["--dtype", "float32", "--enforce-eager", "--served-model-name", MODEL]
    # As its user starts it: with an interpreter of its own.
    with RemoteServer(ROOT / MODEL, *flags, fresh=True) as running:
        yield running


@pytest.mark.parametrize("command", CURLS, ids=str)
def test_curl(server: RemoteServer, command: Command) -> None:
    words = [word.replace("http://localhost:8000", server.url) for word in command.words]
    line = shlex.join(words).replace("'$MODEL'", MODEL).replace("$MODEL", MODEL)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    if "data: " in done.stdout:
        assert done.stdout.rstrip().endswith("data: [DONE]")
    else:
        assert "error" not in json.loads(done.stdout)


@pytest.mark.parametrize("command", BENCHES, ids=str)
def test_bench_serve(server: RemoteServer, command: Command, tmp_path: Path) -> None:
    small = ["--num-prompts", "3", "--random-input-len", "16", "--random-output-len", "4"]
    here = ["--port", str(server.port), "--result-dir", str(tmp_path), "--request-rate", "inf"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def", "output_tokens": 4}\n')
    files = (".png", ".jsonl")
    words = [str(tmp_path / word) if word.endswith(files) else word for word in command.words[1:]]
    assert vllm([*words, *small, *here]) == 0


@pytest.mark.parametrize("block", CLIENT_BLOCKS)
def test_clients(server: RemoteServer, block: str) -> None:
    exec(block.replace("http://localhost:8000", server.url), {})


@pytest.mark.parametrize("block", LIBRARY_BLOCKS)
def test_the_library(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(block, names)
    names["llm"].shutdown()
