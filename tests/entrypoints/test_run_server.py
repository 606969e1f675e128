# SPDX-License-Identifier: Apache-2.0
"""What a server does while its engine starts."""

from __future__ import annotations

import gc
import importlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.entrypoints.openai import run_server
from vllm.entrypoints.openai.cli_args import FrontEndArgs
from vllm.exceptions import VLLMValidationError


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
