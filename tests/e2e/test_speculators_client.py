# SPDX-License-Identifier: Apache-2.0
"""speculators' own client code against a server started with speculators' own command line."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.e2e.remote_server import RemoteServer
from tests.tiny_models import hf_residual_streams, tiny_model
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

hs_connectors = pytest.importorskip("hs_connectors")

pytestmark = [pytest.mark.slow, pytest.mark.extraction, pytest.mark.e2e]


def vllm_client() -> Any:
    """speculators takes seconds to import: tests do that, not the collection."""
    return pytest.importorskip("speculators.data_generation.vllm_client")


def offline() -> Any:
    return pytest.importorskip("speculators.data_generation.offline")


NUM_LAYERS = 4
#: what speculators' launcher makes of a model with four layers and `--target-layer-ids 0 2 3`
LAYER_IDS = [0, 2, 3, NUM_LAYERS]
MAX_MODEL_LEN = 300


def launch_flags(path: Path, backend: str = "file") -> list[str]:
    """The arguments that speculators' scripts/launch_vllm.py adds to `vllm serve MODEL`."""
    args = argparse.Namespace(hidden_states_path=str(path))
    transfer = hs_connectors.HiddenStatesBackend.registry[backend].build_kv_transfer_config(args)
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS}},
    }
    return [
        "--speculative_config",
        json.dumps(speculative),
        "--kv_transfer_config",
        json.dumps(transfer),
        *("--api-server-count", "2", "--renderer-num-workers", "2"),
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--dtype",
        "float32",
    ]


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    return tmp_path_factory.mktemp(f"hidden_states_{family}")


@pytest.fixture(scope="module")
def server(family: str, storage: Path) -> Iterator[RemoteServer]:
    with RemoteServer(tiny_model(family), *launch_flags(storage)) as running:
        yield running


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, MAX_MODEL_LEN - 1, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def check(family: str, token_ids: list[int], data: dict[str, torch.Tensor]) -> None:
    """speculators' own check, then the values."""
    offline().check_hidden_states(data, token_ids)
    assert data["hidden_states"].shape == (len(token_ids), len(LAYER_IDS), 64)
    streams = hf_residual_streams(tiny_model(family), token_ids)
    for column, layer_id in enumerate(LAYER_IDS):
        expected = streams[layer_id]
        error = (data["hidden_states"][:, column] - expected).norm() / expected.norm()
        assert error < 2e-5


def test_file_transfer(server: RemoteServer, family: str, storage: Path) -> None:
    """As training does it: generate, load through the transfer, delete."""
    transfer = hs_connectors.FileTransfer(storage)
    client = server.client()
    for token_ids in [*prompts(6), [7] * (MAX_MODEL_LEN - 1)]:
        handle, params = vllm_client().generate_hidden_states(
            client, server.model, {"input_ids": token_ids}, max_retries=0
        )
        assert Path(handle).parent == storage
        data = transfer.get_generated(params)
        assert data is not None
        check(family, token_ids, data)
        transfer.delete(handle)
    assert not list(storage.iterdir())


def test_many_at_once(server: RemoteServer, family: str, storage: Path) -> None:
    """As offline generation does it: an asynchronous client with many requests in flight."""
    wanted = prompts(40)

    async def one(client: Any, token_ids: list[int]) -> str:
        handle, _ = await vllm_client().generate_hidden_states_async(
            client, server.model, {"input_ids": token_ids}, max_retries=0
        )
        lock = f"{handle}.lock"
        if Path(lock).exists():
            await vllm_client().wait_for_lock_async(lock)
        return handle

    async def run() -> list[str]:
        async with openai.AsyncClient(base_url=server.url + "/v1", api_key="EMPTY") as client:
            return await asyncio.gather(*(one(client, ids) for ids in wanted))

    handles = asyncio.run(run())
    assert len(set(handles)) == len(wanted)
    transfer = hs_connectors.FileTransfer(storage)
    for token_ids, handle in zip(wanted, handles, strict=True):
        data = transfer.get_generated({"hidden_states_path": handle})
        assert data is not None
        check(family, token_ids, data)
        transfer.delete(handle)
    assert not list(storage.iterdir())


def test_chat_prompts(server: RemoteServer, family: str) -> None:
    """With `messages` the client uses the chat route and compares the rendered prompt."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rendered = server.post(
        "/v1/chat/completions",
        model=server.model,
        messages=messages,
        max_tokens=1,
        add_generation_prompt=False,
        return_token_ids=True,
    )["prompt_token_ids"]
    handle, _ = vllm_client().generate_hidden_states(
        server.client(),
        server.model,
        {"input_ids": rendered, "messages": messages},
        max_retries=0,
    )
    check(family, rendered, load_hidden_states(handle))


def test_client_that_goes_away(server: RemoteServer, family: str, storage: Path) -> None:
    """An aborted request leaves no data file, and the next one is served."""
    before = set(storage.glob("*.safetensors"))
    with pytest.raises(openai.APITimeoutError):
        server.client().with_options(timeout=0.3).completions.create(
            model=server.model,
            prompt=[5] * 20,
            max_tokens=250,
            n=128,
            extra_body={"ignore_eos": True},
        )
    token_ids = [9] * 30
    handle, _ = vllm_client().generate_hidden_states(
        server.client(), server.model, {"input_ids": token_ids}, max_retries=0
    )
    check(family, token_ids, load_hidden_states(handle))
    assert set(storage.glob("*.safetensors")) - before == {Path(handle)}


def test_fp8_transfer(tmp_path: Path) -> None:
    """hs_connectors' subclass stores rows in eight bits; its reader undoes it."""
    flags = launch_flags(tmp_path, "fp8")
    # With processes that are spawned, as they are for users.
    spawn = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    with RemoteServer(tiny_model("llama"), *flags, env=spawn) as server:
        token_ids = [11] * 50
        handle, params = vllm_client().generate_hidden_states(
            server.client(), server.model, {"input_ids": token_ids}, max_retries=0
        )
        data = hs_connectors.FP8Transfer(tmp_path, torch.float32).get_generated(params)
        assert data is not None
        offline().check_hidden_states(data, token_ids)
        expected = torch.stack(hf_residual_streams(tiny_model("llama"), token_ids), dim=1)
        expected = expected[:, LAYER_IDS]
        # Three bits of mantissa and one scale per token.
        assert (data["hidden_states"] - expected).norm() / expected.norm() < 0.05
