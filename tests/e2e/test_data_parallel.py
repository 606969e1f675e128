# SPDX-License-Identifier: Apache-2.0
"""Replicas with a real model: the tokens and hidden states of one engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.remote_server import RemoteServer
from tests.e2e.test_extraction import engine, prompts
from tests.tiny_models import tiny_model
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forking")]

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(20, 33, 50, 7, 64, 41)


@pytest.fixture(scope="module")
def expected(asked: list[list[int]]) -> list[list[int]]:
    """From one engine in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM(
            str(tiny_model("qwen3_5")),
            max_model_len=256,
            dtype="float32",
            seed=0,
            kv_cache_memory_bytes=64 << 20,
        )
    try:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(asked, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        llm.shutdown()


def test_tokens_and_hidden_states_of_two_replicas(
    asked: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    """Each request's file is its own, though the replicas write to one directory."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with engine("qwen3_5", tmp_path, ids=[0, 4], data_parallel_size=2) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        config = llm.llm_engine.engine_core.configs
        names = {one.kv_transfer_config.engine_id for one in config if one.kv_transfer_config}
        assert {name[-4:] for name in names} == {"_dp0", "_dp1"}
        router = llm.llm_engine.engine_core.router
        assert router is not None
        assert sum(router.choices[0, reason] for reason in ("load", "prefix")) == 3
        paths = []
        for prompt, tokens, output in zip(asked, expected, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == tokens
            assert output.kv_transfer_params is not None
            paths.append(output.kv_transfer_params["hidden_states_path"])
            rows = load_hidden_states(paths[-1])
            stored = rows["token_ids"].tolist()
            assert stored[: len(prompt)] == prompt
            assert rows["hidden_states"].shape[0] == len(stored)
            assert torch.isfinite(rows["hidden_states"]).all()
        assert len(set(paths)) == len(asked)


@pytest.mark.slow
def test_a_server_with_two_replicas(asked: list[list[int]], expected: list[list[int]]) -> None:
    flags = ["-dp", "2", "-asc", "2", "--max-model-len", "256", "--dtype", "float32"]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with RemoteServer(tiny_model("qwen3_5"), *flags, env=environment, fresh=True) as server:
        # By default all are forked: the first core, the fork server, the second core, two for HTTP.
        commands = {" ".join(child.cmdline()) for child in server.children()}
        assert len(server.children()) == 5 and len(commands) == 1, commands
        replies = []
        for index, prompt in enumerate(asked):
            body = {
                "model": server.model,
                "prompt": prompt,
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            headers = {"X-data-parallel-rank": str(index % 2)}
            reply = server.http.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            replies.append(reply.json()["choices"][0]["token_ids"])
        assert replies == expected
        text = server.http.get("/metrics").text
        for rank in (0, 1):
            assert f'vllm:replica_requests_total{{engine="{rank}",' in text
            assert 'reason="pinned"} 3.0' in text
