# SPDX-License-Identifier: Apache-2.0
"""What a server does while its engine starts."""

from __future__ import annotations

import gc
import importlib

import pytest

from vllm.entrypoints.openai import run_server


def test_what_is_imported_is_looked_at_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection over all modules takes a quarter of a second; frozen, they take none later."""
    done: list[str] = []
    monkeypatch.setattr(importlib, "import_module", done.append)
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    run_server._import_application()
    assert done == ["vllm.entrypoints.openai.api_server", "collect", "freeze"]
