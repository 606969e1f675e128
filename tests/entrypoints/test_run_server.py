# SPDX-License-Identifier: Apache-2.0
"""What a server does while its engine starts."""

from __future__ import annotations

import gc
import importlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.entrypoints.openai import run_server
from vllm.entrypoints.openai.cli_args import FrontEndArgs, make_arg_parser
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser


def test_what_is_imported_is_looked_at_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection over all modules takes a quarter of a second; frozen, they take none later."""
    done: list[str] = []
    monkeypatch.setattr(importlib, "import_module", done.append)
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    run_server._import_application()
    assert done == ["vllm.entrypoints.openai.api_server", "collect", "freeze"]


@pytest.mark.parametrize(
    ("headless", "nodes", "node_rank", "words"),
    [
        (True, 1, 0, "--headless is for a host that has workers only.*--nnodes and --node-rank"),
        (True, 3, 0, "--headless with --node-rank 0: .* 1 to 2"),
        (False, 3, 2, "--node-rank 2: the API is on node 0; add --headless"),
        (True, 3, 2, None),
        (False, 3, 3, None),  # no host's: the configuration says so
        (False, 1, 1, None),
        (False, 3, 0, None),
        (False, 1, 0, None),
    ],
)
def test_one_host_has_the_api(
    headless: bool, nodes: int, node_rank: int, words: str | None
) -> None:
    args: Any = FrontEndArgs(headless=headless)
    engine: Any = SimpleNamespace(nnodes=nodes, node_rank=node_rank)
    with nullcontext() if words is None else pytest.raises(VLLMValidationError, match=words):
        run_server.check_node_role(args, engine)


@pytest.mark.parametrize(
    ("status", "policy", "restarts"),
    [(1, "restart", 1), (1, "stop", 0), (0, "restart", 0)],
)
def test_a_server_restarts_after_a_failure_if_told_to(
    status: int, policy: str, restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []
    monkeypatch.setattr(run_server, "_run", lambda args, engine_args: status)
    monkeypatch.setattr(run_server, "restart", lambda: asked.append(None))
    parser = FlexibleArgumentParser()
    make_arg_parser(parser)
    namespace = parser.parse_args(["--model", "none", "--on-failure", policy])
    assert run_server.run_server(namespace) == status
    assert len(asked) == restarts


def test_metrics_of_processes_need_their_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Said before a model is loaded."""
    monkeypatch.setattr(run_server, "_run", lambda args, engine_args: 0)
    parser = FlexibleArgumentParser()
    make_arg_parser(parser)
    namespace = parser.parse_args(["--model", "none"])
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "absent"))
    with pytest.raises(VLLMValidationError, match="absent: there is no such directory; make it"):
        run_server.run_server(namespace)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert run_server.run_server(namespace) == 0


def test_restarting_and_serving_errors_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run_server.check_failure_policy(FrontEndArgs(on_failure="restart"))
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    run_server.check_failure_policy(FrontEndArgs())
    with pytest.raises(VLLMValidationError, match="exclude each other; unset one of them"):
        run_server.check_failure_policy(FrontEndArgs(on_failure="restart"))
