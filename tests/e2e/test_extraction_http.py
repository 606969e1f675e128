# SPDX-License-Identifier: Apache-2.0
"""Hidden-state extraction over HTTP, with the flags and the request that speculators sends."""

from __future__ import annotations

import concurrent.futures
import fcntl
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.remote_server import RemoteServer
from tests.tiny_models import hf_model, tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.extraction]

LAYERS = [1, 2, 4]
MAX_MODEL_LEN = 65


def flags(storage: Path) -> list[str]:
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(storage),
            "allow_custom_save_path": True,
        },
    }
    return [
        *["--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN)],
        *["--no-enable-chunked-prefill", "--disable-uvicorn-access-log", "--api-key", ""],
        *["--speculative_config", json.dumps(speculation)],
        *["--kv_transfer_config", json.dumps(transfer)],
    ]


def read(path: str) -> dict[str, torch.Tensor]:
    """As a client does: wait for the writer's lock, then load."""
    with open(path + ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return load_file(path)


@torch.no_grad()
def residual_streams(model: Path, ids: list[int]) -> torch.Tensor:
    """`[tokens, layers, hidden]` of transformers, up to the last layer (whose output transformers
    only shows after the final norm)."""
    states = hf_model(model)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([states[layer][0] for layer in LAYERS[:-1]], dim=1)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_concurrent_requests_get_their_own_complete_rows(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    prompts = [[(7 * i + j) % 256 for j in range(1 + 9 * i % 64)] for i in range(12)]
    with RemoteServer(model, *flags(tmp_path)) as server:

        def ask(ids: list[int]) -> dict:
            return server.post(
                "/v1/completions", prompt=ids, max_tokens=1, return_token_ids=True, temperature=0
            )

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(ask, prompts))
        for ids, reply in zip(prompts, replies, strict=True):
            assert reply["choices"][0]["prompt_token_ids"] == ids
            stored = read(reply["kv_transfer_params"]["hidden_states_path"])
            assert stored["token_ids"].tolist() == ids
            assert stored["hidden_states"].shape == (len(ids), len(LAYERS), 64)
            torch.testing.assert_close(
                stored["hidden_states"][:, :-1], residual_streams(model, ids), rtol=1e-3, atol=1e-3
            )
        check_every_choice_has_a_file(server)
        check_malformed_paths_are_the_clients_fault(server, tmp_path)


def check_every_choice_has_a_file(server: RemoteServer) -> None:
    reply = server.post("/v1/completions", prompt=[[1, 2], [3, 4, 5]], n=2, max_tokens=2, seed=0)
    paths = reply["kv_transfer_params"]["hidden_states_path"]
    assert len(set(paths)) == 4
    stored = [read(path)["token_ids"].tolist() for path in paths]
    assert stored == [[1, 2], [1, 2], [3, 4, 5], [3, 4, 5]]


def check_malformed_paths_are_the_clients_fault(server: RemoteServer, storage: Path) -> None:
    (storage / "folder").mkdir()
    for path in ("../x", "/etc/x", "a\nINFO forged", "a\0", "", 7, "folder"):
        given = {"hidden_states_path": path}
        server.post("/v1/completions", 400, prompt=[1, 2], kv_transfer_params=given)
    assert "\nINFO forged" not in server.log()
    given = {"hidden_states_path": "deep/mine.safetensors"}
    reply = server.post("/v1/completions", prompt=[1, 2, 3], kv_transfer_params=given)
    path = reply["kv_transfer_params"]["hidden_states_path"]
    assert path == str(storage / "deep" / "mine.safetensors")
    assert read(path)["token_ids"].tolist() == [1, 2, 3]
