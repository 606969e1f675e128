# SPDX-License-Identifier: Apache-2.0
"""A server for prompts, one for answers and the proxy before them; then the first is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.e2e.remote_server import MAIN, RemoteServer
from tests.forked_python import CapturedPython
from tests.ports import free_port
from tests.tiny_models import hf_reference_generate, tiny_model

pytestmark = pytest.mark.e2e

PROMPT = [(7 * i + i * i) % 250 for i in range(75)]
NUM_TOKENS = 16
#: a killed server is noticed by its closed connections
NOTICED_S = 30.0


def server(role: str) -> RemoteServer:
    """It gives up a state after 60 s, so that what is quicker did not wait for that."""
    transfer = {
        "kv_connector": "P2pConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host": "127.0.0.1",
            "port": 0,
            "staging_bytes": 2**24,
            "timeout_s": 60,
        },
    }
    flags = ["--dtype", "float32", "--max-model-len", "256", "--kv-transfer-config"]
    return RemoteServer(
        tiny_model("qwen3_5"), *flags, json.dumps(transfer), "--served-model-name", "tiny"
    )


@contextmanager
def proxy(prefill: RemoteServer, decode: RemoteServer) -> Iterator[httpx.Client]:
    port = free_port()
    servers = ["--prefill", prefill.url, "--decode", decode.url]
    process = CapturedPython(MAIN, "proxy", "--port", str(port), *servers)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            deadline = time.monotonic() + 120
            while True:
                try:
                    assert client.get("/health").status_code == 200
                    break
                except httpx.ConnectError:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.05)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        print(process.communicate(60)[1])


def received(running: RemoteServer) -> float:
    text = running.http.get("/metrics").text
    name = "vllm:kv_p2p_received_requests_total"
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def test_two_servers_say_what_one_says() -> None:
    with ExitStack() as stack:
        starting = [server("kv_producer"), server("kv_consumer")]  # both at once
        first, second = (stack.enter_context(one) for one in starting)
        client = stack.enter_context(proxy(first, second))
        body = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        ask = {**body, "prompt": PROMPT, "return_token_ids": True}
        expected = hf_reference_generate(tiny_model("qwen3_5"), PROMPT, NUM_TOKENS)

        def answer() -> list[int]:
            reply = client.post("/v1/completions", json=ask)
            assert reply.status_code == 200, reply.text
            tokens: list[int] = reply.json()["choices"][0]["token_ids"]
            return tokens

        assert answer() == expected and received(second) == 1

        chat = {**body, "messages": [{"role": "user", "content": "hello there"}]}
        alone = second.post("/v1/chat/completions", **chat)["choices"][0]["message"]["content"]
        with client.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as reply:
            events = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
        deltas = [json.loads(event)["choices"] for event in events]
        assert "".join(d[0]["delta"].get("content") or "" for d in deltas if d) == alone

        # Its state is at a server that is killed before anybody fetches it.
        wanted = {**ask, "prompt": PROMPT[5:], "max_tokens": 4}
        asked = {"kv_transfer_params": {"do_remote_decode": True}}
        state = first.post("/v1/completions", **{**wanted, **asked})["kv_transfer_params"]
        elsewhere = {**state, "remote_host": "169.254.169.254"}
        refused = second.http.post(
            "/v1/completions", json={**wanted, "kv_transfer_params": elsewhere}
        )
        assert refused.status_code == 400 and "allowed_peers" in refused.text
        lost = hf_reference_generate(tiny_model("qwen3_5"), PROMPT[5:], 4)
        os.killpg(first.process.pid, signal.SIGKILL)
        began = time.monotonic()
        reply = second.post("/v1/completions", **{**wanted, "kv_transfer_params": state})
        assert reply["choices"][0]["token_ids"] == lost
        assert answer() == expected
        assert time.monotonic() - began < NOTICED_S
