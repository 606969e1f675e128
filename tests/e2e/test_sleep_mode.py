# SPDX-License-Identifier: Apache-2.0
"""Sleeping over HTTP: the server's memory falls, requests get 503, and the text is the same."""

from __future__ import annotations

import re

import httpx
import psutil
import pytest

from tests.e2e.remote_server import RemoteServer
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.e2e

BODY = {"prompt": [5, 6, 7] * 20, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
ARENA_BYTES = 256 << 20


def mapped(server: RemoteServer) -> int:
    """Bytes of memory that the processes have been given, used or not."""
    return sum(psutil.Process(p.pid).memory_info().vms for p in server.children())


def sleep_states(server: RemoteServer) -> set[str]:
    text = server.http.get("/metrics").text
    return set(re.findall(r'^vllm:engine_sleep_state\{.*sleep_state="(\w+)"\} 1.0$', text, re.M))


def post(server: RemoteServer, path: str) -> httpx.Response:
    return server.http.post(path)


def test_sleep_and_wake_up() -> None:
    flags = ["--dtype", "float32", "--max-model-len", "256", "--enable-sleep-mode"]
    flags += ["--kv-cache-memory-bytes", str(ARENA_BYTES)]
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with RemoteServer(tiny_model("qwen3_5"), *flags, env=env) as server:
        unknown = server.post("/collective_rpc", status=400, method="no_such_method")["error"]
        assert "'no_such_method'" in unknown["message"] and unknown["param"] == "method"
        assert server.post("/collective_rpc", method="get_kv_cache_spec")["results"]
        expected = server.post("/v1/completions", **BODY)["choices"][0]["token_ids"]
        assert server.get("/is_sleeping") == {"is_sleeping": False}
        assert post(server, "/sleep?level=7").status_code == 400
        assert post(server, "/sleep?mode=keep").status_code == 400
        assert sleep_states(server) == {"awake"}
        for query, state in (("", "weights_offloaded"), ("?level=2&mode=wait", "discard_all")):
            assert post(server, "/sleep" + query).status_code == 200
            asleep = mapped(server)
            other = post(server, "/sleep?level=" + ("1" if query else "2"))
            assert other.status_code == 400 and "wake it up first" in other.text
            assert server.get("/is_sleeping") == {"is_sleeping": True}
            error = server.post("/v1/completions", status=503, **BODY)["error"]
            assert "wake it up" in error["message"]
            assert server.get("/v1/models")["data"]
            assert post(server, "/wake_up?tags=weights").status_code == 200
            assert server.get("/is_sleeping") == {"is_sleeping": True}
            assert post(server, "/wake_up?tags=nothing").status_code == 400
            assert sleep_states(server) == {state}
            assert post(server, "/wake_up").status_code == 200
            assert server.get("/is_sleeping") == {"is_sleeping": False}
            assert sleep_states(server) == {"awake"}
            assert mapped(server) - asleep > 0.8 * ARENA_BYTES
            again = server.post("/v1/completions", **BODY)["choices"][0]["token_ids"]
            assert again == expected
