# SPDX-License-Identifier: Apache-2.0
"""Replicas with a real model: the tokens and hidden states of one engine."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.e2e.remote_server import RemoteServer
from tests.e2e.test_extraction import engine, prompts
from tests.tiny_models import tiny_model
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("forking")]

NUM_TOKENS = 12
LAYERS = [0, 4]
REASONS = ("load", "prefix")


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(20, 33, 50, 7, 64, 41)


def alone(llm: LLM, prompt: list[int]) -> tuple[list[int], dict[str, Tensor]]:
    """The tokens and the file of a request that nothing runs beside: the rounding of a matmul may
    follow from the rows of a step."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.kv_transfer_params is not None
    found = load_hidden_states(output.kv_transfer_params["hidden_states_path"])
    return list(output.outputs[0].token_ids), found


@pytest.fixture(scope="module")
def one_engine(
    asked: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[int], dict[str, Tensor]]]:
    """From one engine in this process."""
    folder = tmp_path_factory.mktemp("one_engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with engine("qwen3_5", folder, ids=LAYERS) as llm:
            return [alone(llm, prompt) for prompt in asked]


@pytest.fixture(scope="module")
def expected(one_engine: list[tuple[list[int], dict[str, Tensor]]]) -> list[list[int]]:
    return [tokens for tokens, _ in one_engine]


def test_tokens_and_hidden_states_of_two_replicas(
    asked: list[list[int]], one_engine: list[tuple[list[int], dict[str, Tensor]]], tmp_path: Path
) -> None:
    """Each request's file is its own, though the replicas write to one directory, and to the bit
    that of one engine."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with engine("qwen3_5", tmp_path, ids=LAYERS, data_parallel_size=2) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        config = llm.llm_engine.engine_core.configs
        names = {one.kv_transfer_config.engine_id for one in config if one.kv_transfer_config}
        assert {name[-4:] for name in names} == {"_dp0", "_dp1"}
        router = llm.llm_engine.engine_core.router
        assert router is not None
        assert sum(router.choices[0, reason] for reason in REASONS) == 3
        paths = []
        for (tokens, rows), output in zip(one_engine, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == tokens
            assert output.kv_transfer_params is not None
            paths.append(output.kv_transfer_params["hidden_states_path"])
            found = load_hidden_states(paths[-1])
            assert torch.equal(found["token_ids"], rows["token_ids"])
            torch.testing.assert_close(found["hidden_states"], rows["hidden_states"])
        assert len(set(paths)) == len(asked)
        before = [sum(router.choices[rank, why] for why in REASONS) for rank in (0, 1)]
        assert llm.reset_prefix_cache()
        for prompt, (tokens, rows) in zip(asked, one_engine, strict=True):
            said, found = alone(llm, prompt)
            assert said == tokens
            assert torch.equal(found["token_ids"], rows["token_ids"])
            assert found["hidden_states"].shape == (len(rows["token_ids"]), len(LAYERS), 64)
            assert torch.equal(found["hidden_states"], rows["hidden_states"])
        after = [sum(router.choices[rank, why] for why in REASONS) for rank in (0, 1)]
        assert all(b < a for b, a in zip(before, after, strict=True)), "both replicas"


def completed(
    server: RemoteServer, prompt: list[int], headers: dict[str, str] | None = None
) -> list[int]:
    """The tokens of a greedy completion."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = server.http.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


@pytest.mark.slow
def test_a_server_per_replica(asked: list[list[int]], expected: list[list[int]]) -> None:
    """With upstream's flags for replicas behind a load balancer; each server knows its rank, and
    the first is ready without the second."""
    flags = ["--max-model-len", "256", "--dtype", "float32", "-dp", "2"]
    flags += ["--data-parallel-address", "10.255.255.1", "--data-parallel-rpc-port", "13345"]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    model = tiny_model("qwen3_5")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(RemoteServer(model, *flags, "-dpn", str(rank), env=environment))
            for rank in (0, 1)
        ]
        for rank, server in enumerate(servers):
            assert len(server.children()) == 1, "the core; nothing is forked later"
            found = [completed(server, prompt) for prompt in asked[rank::2]]
            assert found == expected[rank::2]
            metrics = server.http.get("/metrics").text
            assert f'vllm:request_success_total{{engine="{rank}",' in metrics
            assert f'engine="{1 - rank}"' not in metrics
            shown = {one["what"]: one["chosen"] for one in server.http.get("/decisions").json()}
            assert shown["--data-parallel-address"] == "unused"
            other = {"X-data-parallel-rank": str(1 - rank)}
            body = {"model": server.model, "prompt": asked[0], "max_tokens": 1}
            reply = server.http.post("/v1/completions", json=body, headers=other)
            assert reply.status_code == 400 and "data_parallel_rank" in reply.text


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
            headers = {"X-data-parallel-rank": str(index % 2)}
            replies.append(completed(server, prompt, headers))
        assert replies == expected
        text = server.http.get("/metrics").text
        for rank in (0, 1):
            assert f'vllm:replica_requests_total{{engine="{rank}",' in text
            assert 'reason="pinned"} 3.0' in text
