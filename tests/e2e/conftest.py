# SPDX-License-Identifier: Apache-2.0
"""Shared servers of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.remote_server import RemoteServer

#: context of the shared servers, in tokens
MAX_MODEL_LEN = 4096
#: the shared server whose requests several processes read and answer
THREE_PROCESSES = "llama behind 3 API processes"
#: what every run tries there; all other tests of the shared servers do so in nightly runs
_TRIED_THERE = frozenset(
    {
        "test_greedy_tokens_equal_transformers",
        "test_stream_equals_reply",
        "test_chat_through_the_official_client",
        "test_stop_strings",
        "test_leaving_aborts_in_the_engine",
        "test_many_clients",
        "test_metrics_count",
    }
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and f"[{THREE_PROCESSES}" in item.name
            and item.originalname not in _TRIED_THERE
        ):
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="module", params=["llama", "qwen3_5", THREE_PROCESSES])
def server(request: pytest.FixtureRequest) -> Iterator[RemoteServer]:
    """A server of a tiny model in float32: one per family, and one of several API processes."""
    from tests.e2e.remote_server import RemoteServer
    from tests.tiny_models import tiny_model

    flags = ["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    flags += ["--served-model-name", "tiny", "alias"]
    family = request.param
    if family == THREE_PROCESSES:
        family = "llama"
        flags += ["--api-server-count", "3"]
    with RemoteServer(tiny_model(family), *flags) as running:
        yield running
