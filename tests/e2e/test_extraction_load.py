# SPDX-License-Identifier: Apache-2.0
"""Many extracting clients at once, some of which leave early."""

from __future__ import annotations

import asyncio
import fcntl
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.remote_server import RemoteServer
from tests.tiny_models import tiny_model
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.extraction]

LAYER_IDS = [0, 2, 4]
MAX_MODEL_LEN = 257
NUM_REQUESTS = 500
HIDDEN_SIZE = 64


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    return tmp_path_factory.mktemp(f"hidden_states_{family}")


@pytest.fixture(scope="module")
def server(family: str, storage: Path) -> Iterator[RemoteServer]:
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    flags = [
        *["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)],
        *["--speculative_config", json.dumps(speculation)],
        *["--kv_transfer_config", json.dumps(transfer), "--disable-uvicorn-access-log"],
    ]
    with RemoteServer(tiny_model(family), *flags) as running:
        yield running


def http_client(server: RemoteServer) -> httpx.AsyncClient:
    """Any number of connections, for one request each: httpx compares every idle one of a pool with
    all others whenever a request ends."""
    limits = httpx.Limits(max_connections=None)
    headers = {"Connection": "close"}
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits, headers=headers)


async def ask(client: httpx.AsyncClient, token_ids: list[int], **fields: Any) -> str:
    """The path of the hidden states."""
    body = {"prompt": token_ids, "max_tokens": 1, **fields}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    path: str = reply.json()["kv_transfer_params"]["hidden_states_path"]
    return path


def random_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [rng.randrange(1, MAX_MODEL_LEN) for _ in range(count)]
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def metric(server: RemoteServer, name: str) -> float:
    text = server.http.get("/metrics").text
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not among the metrics"
    return sum(map(float, found))


def test_every_request_has_a_file_of_its_length(server: RemoteServer, storage: Path) -> None:
    prompts = random_prompts(NUM_REQUESTS, seed=0)

    async def run() -> list[str]:
        async with http_client(server) as client:
            return await asyncio.gather(*(ask(client, ids) for ids in prompts))

    paths = asyncio.run(run())
    assert len(set(paths)) == NUM_REQUESTS
    for token_ids, path in zip(prompts, paths, strict=True):
        data = load_hidden_states(path)
        assert data["token_ids"].tolist() == token_ids
        assert data["hidden_states"].shape == (len(token_ids), len(LAYER_IDS), HIDDEN_SIZE)
        cleanup_hidden_states(path)
    assert not list(storage.iterdir()), "files that no reply names"


def test_clients_that_leave_free_everything(server: RemoteServer, storage: Path) -> None:
    """Disconnects before, while and after a request runs; a few clients stay."""
    prompts = random_prompts(120, seed=1)
    rng = random.Random(2)

    async def leave(client: httpx.AsyncClient, token_ids: list[int], after_s: float) -> bool:
        fields = {
            "max_tokens": MAX_MODEL_LEN - len(token_ids),
            "ignore_eos": True,
            "kv_transfer_params": {"include_output_tokens": True},
        }
        try:
            await asyncio.wait_for(ask(client, token_ids, **fields), after_s)
        except asyncio.TimeoutError:
            return True
        return False

    async def run() -> tuple[list[str], list[bool]]:
        async with http_client(server) as client:
            leaving = [leave(client, ids[:100], rng.uniform(0, 2)) for ids in prompts[20:]]
            staying = [ask(client, ids) for ids in prompts[:20]]
            return await asyncio.gather(asyncio.gather(*staying), asyncio.gather(*leaving))

    paths, left = asyncio.run(run())
    assert any(left), "every request was done before its client could leave"
    deadline = time.monotonic() + 60
    while metric(server, "vllm:num_requests_running") + metric(server, "vllm:num_requests_waiting"):
        assert time.monotonic() < deadline, "requests of clients that left are still running"
        time.sleep(0.1)
    for token_ids, path in zip(prompts[:20], paths, strict=True):
        assert load_hidden_states(path)["token_ids"].tolist() == token_ids
    while list(storage.glob(".incomplete-*")):
        assert time.monotonic() < deadline, "an unfinished file was left behind"
        time.sleep(0.1)
    for lock in storage.glob("*.lock"):
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    reply = server.post("/v1/completions", prompt=[1, 2, 3], max_tokens=1)
    load_hidden_states(reply["kv_transfer_params"]["hidden_states_path"])
    assert metric(server, "vllm:num_requests_running") == 0


def test_stop_string(server: RemoteServer) -> None:
    fields: dict[str, Any] = {
        "prompt": [5, 6, 7],
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
    }
    fields["kv_transfer_params"] = {"include_output_tokens": True}
    text = server.post("/v1/completions", **fields)["choices"][0]["text"]
    stop = next(c for c in text[5:] if c.isascii() and c.isprintable())
    reply = server.post("/v1/completions", **fields, stop=stop, return_token_ids=True)
    [choice] = reply["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    data = load_hidden_states(reply["kv_transfer_params"]["hidden_states_path"])
    assert data["token_ids"].tolist() == [5, 6, 7, *choice["token_ids"][:-1]]


def test_names_never_come_from_the_client(server: RemoteServer, storage: Path) -> None:
    body: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 1, "request_id": "../../x/y"}
    body["kv_transfer_params"] = {"hidden_states_path": "/tmp/elsewhere.safetensors"}
    headers = {"X-Request-Id": "../../a\\b"}
    reply = server.http.post("/v1/completions", json=body, headers=headers)
    path = Path(reply.json()["kv_transfer_params"]["hidden_states_path"])
    assert path.parent == storage and load_hidden_states(path)["token_ids"].tolist() == [1, 2]


def test_storage_that_fails_fails_that_request_only(server: RemoteServer, storage: Path) -> None:
    aside = storage.with_name("aside")
    storage.rename(aside)
    storage.write_text("a file where the directory was")
    try:
        error = server.post("/v1/completions", status=500, prompt=[1, 2], max_tokens=1)["error"]
    finally:
        storage.unlink()
        aside.rename(storage)
    assert "hidden states cannot be stored" in error["message"]
    reply = server.post("/v1/completions", prompt=[1, 2], max_tokens=1)
    path = reply["kv_transfer_params"]["hidden_states_path"]
    assert load_hidden_states(path)["token_ids"].tolist() == [1, 2]
