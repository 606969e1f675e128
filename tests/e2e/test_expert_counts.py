# SPDX-License-Identifier: Apache-2.0
"""`GET /experts`: every computed token is counted once per slot, and only these."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.remote_server import RemoteServer
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.e2e

FLAGS = ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", str(16 << 20)]
BODY = {"prompt": [5, 6, 7] * 20, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
BALANCEDNESS = re.compile(r'^vllm:expert_balancedness\{.*when="(\w+)"\} (\S+)$', re.MULTILINE)
METRIC = re.compile(r'^vllm:expert_imbalance\{layer="([^"]+)",.*\} (\S+)$', re.MULTILINE)


def test_tokens_per_expert() -> None:
    with RemoteServer(tiny_model("qwen3_moe"), *FLAGS, "--expert-counts") as server:
        loads = server.get("/experts")
        before, balancedness = loads["layers"], loads["balancedness"]
        assert balancedness is None, "experts stay where they are"
        # Layer 1 of the tiny model has no experts.
        assert [layer["layer"] for layer in before] == [f"model.layers.{i}.mlp" for i in (0, 2, 3)]
        assert all(layer["tokens"] == [0] * 8 for layer in before), "start-up counts for nothing"
        assert all(layer["imbalance"] is None for layer in before)
        assert not METRIC.findall(server.http.get("/metrics").text)
        server.post("/v1/completions", **BODY)
        layers = server.get("/experts")["layers"]
        for layer in layers:
            # Two experts for each token of the prompt and of the answer but for its last.
            assert sum(layer["tokens"]) == 2 * (60 + 15)
            assert layer["imbalance"] == max(layer["tokens"]) * 8 / sum(layer["tokens"]) > 1
        shown = dict(METRIC.findall(server.http.get("/metrics").text))
        assert {layer["layer"]: layer["imbalance"] for layer in layers} == pytest.approx(
            {name: float(value) for name, value in shown.items()}
        )


def test_balancedness_of_ranks() -> None:
    config = json.dumps({"window_size": 4, "step_interval": 4, "num_redundant_experts": 2})
    flags = ["-tp", "2", "-ep", "--enable-eplb", "--eplb-config", config]
    with RemoteServer(tiny_model("qwen3_moe"), *FLAGS, *flags) as server:
        assert server.get("/experts")["balancedness"] is None
        assert "expert_balancedness" not in server.http.get("/metrics").text
        server.post("/v1/completions", **BODY)
        loads = server.get("/experts")
        assert all(sum(layer["tokens"]) == 2 * (60 + 15) for layer in loads["layers"])
        found = loads["balancedness"]
        assert 0.5 <= found["before"] <= found["after"] <= 1
        shown = dict(BALANCEDNESS.findall(server.http.get("/metrics").text))
        assert {when: float(value) for when, value in shown.items()} == pytest.approx(found)


def test_without_the_flag_the_route_says_what_to_do() -> None:
    with RemoteServer(tiny_model("qwen3_moe"), *FLAGS) as server:
        response = server.http.get("/experts")
        assert response.status_code == 404
        assert "--expert-counts" in response.json()["error"]["message"]
        assert "expert_imbalance" not in server.http.get("/metrics").text
