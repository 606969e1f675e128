# SPDX-License-Identifier: Apache-2.0
"""What layers find belongs to the thread that runs their step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.compilation.graph_break import graph_break, set_recorder
from vllm.compilation.monitor import capturing, is_capturing
from vllm.config import VllmConfig, get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_transfer_state import ConnectorSlot, use_slot
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    set_forward_context,
)


def on_another_thread(ask: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers[0]


@pytest.mark.parametrize(
    ("enter", "ask"),
    [
        (lambda: set_forward_context(ForwardContext({}, {})), is_forward_context_available),
        (lambda: set_current_vllm_config(VllmConfig()), get_current_vllm_config_or_none),
        (lambda: use_slot(ConnectorSlot(SimpleNamespace())), has_kv_transfer_group),
        (capturing, is_capturing),
    ],
    ids=["context", "config", "connector", "capture"],
)
def test_nothing_shows_on_another_thread(
    enter: Callable[[], AbstractContextManager[Any]], ask: Callable[[], Any]
) -> None:
    with enter():
        assert ask()
        assert not on_another_thread(ask)
    assert not ask()


def test_a_capture_does_not_break_another_engines_step() -> None:
    calls: list[str] = []
    op = graph_break(lambda: calls.append("ran"))
    recorder = SimpleNamespace(run_between=lambda call: calls.append("recorded"))
    previous = set_recorder(recorder)
    try:
        on_another_thread(op)
        op()
    finally:
        set_recorder(previous)
    assert calls == ["ran", "recorded"]


def test_inner_context_ends_with_its_block() -> None:
    outer, inner = ForwardContext({}, {}), ForwardContext({}, {})
    with set_forward_context(outer):
        with set_forward_context(inner):
            assert get_forward_context() is inner
        assert get_forward_context() is outer
    with pytest.raises(RuntimeError, match="no forward context"):
        get_forward_context()
