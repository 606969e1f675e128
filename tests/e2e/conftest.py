# SPDX-License-Identifier: Apache-2.0
"""Shared servers of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.remote_server import RemoteServer
from tests.tiny_models import tiny_model

#: context of the shared servers, in tokens
MAX_MODEL_LEN = 4096


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def server(request: pytest.FixtureRequest) -> Iterator[RemoteServer]:
    """A server of a tiny model in float32, once per family."""
    flags = ["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    with RemoteServer(
        tiny_model(request.param), *flags, "--served-model-name", "tiny", "alias"
    ) as running:
        yield running
