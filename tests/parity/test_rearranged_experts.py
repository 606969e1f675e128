# SPDX-License-Identifier: Apache-2.0
"""Experts that move between ranks every few steps: the tokens are those of one engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_replicas import Traffic
from parity_checks import assert_equals_reference, generate, on_cpus, prompts
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from tests.nightly import nightly
from vllm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.moe import mixtures_of
from vllm.utils import start_method
from vllm.v1.worker.worker import Worker

pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    on_cpus,
]

ROUTERS = (".gate.weight", ".router.weight")
OFTEN = {"num_redundant_experts": 2, "window_size": 4, "step_interval": 5}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Makes engines whose experts move; they are shut down at the end."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(start_method, "_other_threads", list)
    made: list[LLM] = []

    def make(model: Path, **options: Any) -> LLM:
        settings: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": 64 * 2**20,
            "enable_expert_parallel": True,
            "enable_eplb": True,
            "eplb_config": OFTEN,
        }
        made.append(LLM(**{**settings, **options}))
        return made[-1]

    yield make
    for one in made:
        one.llm_engine.engine_core.shutdown()


def skewed(family: str, folder: Path, factor: float = 4.0) -> Path:
    """A checkpoint whose routers like every second expert: those that one of two ranks begins
    with."""
    model = folder / family
    shutil.copytree(tiny_model(family), model)
    tensors = load_file(model / "model.safetensors")
    routers = [name for name in tensors if name.endswith(ROUTERS) and "shared" not in name]
    assert routers
    for name in routers:
        tensors[name][::2] *= factor
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def held(worker: Worker) -> list[tuple[int, ...]]:
    """Of each mixture, the experts of this rank."""
    return [one.experts.stack.experts for one in mixtures_of(worker.model_runner.model)]


def weights(worker: Worker) -> list[torch.Tensor]:
    mixtures = mixtures_of(worker.model_runner.model)
    return [param.clone() for one in mixtures for param in one.experts.parameters()]


def balancedness(llm: LLM) -> tuple[float, float]:
    """Over layers, before and after the last rearrangement."""
    layers = list(llm.collective_rpc("expert_balancedness")[0].values())
    before, after = (sum(column) / len(layers) for column in zip(*layers, strict=True))
    return before, after


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss", *nightly("mixtral", "kimi_linear")])
def test_ranks_of_one_engine(family: str, engine: Callable[..., LLM], tmp_path: Path) -> None:
    """And what is loaded again goes where the experts are."""
    model = skewed(family, tmp_path)
    llm = engine(model, tensor_parallel_size=2, enable_prefix_caching=True)
    began = llm.collective_rpc(held)
    for seed in range(3):
        for output in generate(llm, prompts((1, 17, 63, 300), seed=seed), 24):
            assert_equals_reference(output, model, 24)
        now = llm.collective_rpc(held)
        assert [list(map(len, rank)) for rank in now] == [list(map(len, rank)) for rank in began]
    assert now != began
    kept = llm.collective_rpc(weights)
    llm.collective_rpc("reload_weights")
    for before, after in zip(kept, llm.collective_rpc(weights), strict=True):
        assert all(map(torch.equal, before, after))


def test_replicas(engine: Callable[..., LLM], tmp_path: Path) -> None:
    """One has most of the requests, or all; they sleep, and read their weights again."""
    model = skewed("qwen3_5_moe", tmp_path)
    llm = engine(model, data_parallel_size=2, enable_sleep_mode=True)
    began = llm.collective_rpc(held)
    asked = prompts((40, 3, 130, 64, 9, 200), seed=2)
    for ranks in ((0, 1, 0, 0, 1, 0), (1, 1, 1)):
        traffic = Traffic(llm)
        for rank, ids in zip(ranks, asked, strict=False):
            traffic.add(rank, ids, 30)
            traffic.run(3)
        traffic.run()
        for name, length in traffic.lengths.items():
            assert_equals_reference(traffic.outputs[name], model, length)
    now = llm.collective_rpc(held)
    assert now != began and now[0] != now[1]
    kept = llm.collective_rpc(weights)
    llm.sleep(level=2)
    llm.wake_up()
    for before, after in zip(kept, llm.collective_rpc(weights), strict=True):
        assert all(map(torch.equal, before, after))
    traffic = Traffic(llm)
    names = [traffic.add(i % 2, ids, 60) for i, ids in enumerate(asked)]
    for _ in range(3):
        traffic.run(12)
        llm.collective_rpc("reload_weights")
    traffic.run()
    for name in names:
        assert_equals_reference(traffic.outputs[name], model, 60)


def test_experts_of_a_drafter_move_too(engine: Callable[..., LLM], tmp_path: Path) -> None:
    target = skewed("mixtral", tmp_path)
    draft = {"method": "draft_model", "model": str(skewed("qwen3_moe", tmp_path))}
    llm = engine(
        target,
        tensor_parallel_size=2,
        speculative_config={**draft, "num_speculative_tokens": 2},
    )
    for output in generate(llm, prompts((5, 90, 33)), 24):
        assert_equals_reference(output, target, 24)
    layers = llm.collective_rpc("expert_balancedness")[0]
    # Where copies follow the window's tokens already, none moves.
    assert len(layers) == 4 + 3 and all(before <= after for before, after in layers.values())
    moved = [name for name, (before, after) in layers.items() if before < after]
    assert {name.startswith("model.") for name in moved} == {True, False}, layers


def test_bits_do_not_depend_on_the_batch(engine: Callable[..., LLM], tmp_path: Path) -> None:
    """While experts stay where they are; half of them have a copy. A token's four experts are added
    up rank by rank, so other copies would give other bits."""
    still = {"num_redundant_experts": 4, "step_interval": 10**6}
    model = skewed("qwen3_moe", tmp_path)
    llm = engine(
        model,
        tensor_parallel_size=2,
        eplb_config=still,
        enable_prefix_caching=False,
        hf_overrides={"num_experts_per_tok": 4},
    )
    asked = prompts((5, 40, 63, 130))
    together = generate(llm, asked, 16)
    for ids, beside in zip(asked, together, strict=True):
        (alone,) = generate(llm, [ids], 16)
        assert [one.logprobs for one in alone.outputs] == [one.logprobs for one in beside.outputs]
        assert alone.outputs[0].token_ids == beside.outputs[0].token_ids


@pytest.mark.parametrize(
    "sizes", [{"data_parallel_size": 2}, *nightly({"pipeline_parallel_size": 2})]
)
def test_ranks_of_ranks(sizes: dict[str, int], engine: Callable[..., LLM], tmp_path: Path) -> None:
    """Of two replicas, all have the experts; of two stages, each has its own."""
    model = skewed("mixtral", tmp_path)
    settings = {**OFTEN, "num_redundant_experts": 4}
    llm = engine(model, tensor_parallel_size=2, eplb_config=settings, **sizes)
    began = llm.collective_rpc(held)
    for output in generate(llm, prompts((1, 17, 63, 300, 20)), 24):
        assert_equals_reference(output, model, 24)
    assert llm.collective_rpc(held) != began
    found: dict[str, list[float]] = {}
    for rank in llm.collective_rpc("expert_balancedness"):
        assert all(found.get(name, pair) == pair for name, pair in rank.items())
        found |= rank
    assert len(found) == 4 and all(before <= after for before, after in found.values())


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "data_parallel_size"])
def test_balancedness_rises(layout: str, engine: Callable[..., LLM], tmp_path: Path) -> None:
    """The first window finds most tokens on one rank."""
    settings = {"num_redundant_experts": 2, "window_size": 20, "step_interval": 20}
    llm = engine(skewed("mixtral", tmp_path, 40.0), eplb_config=settings, **{layout: 2})
    generate(llm, prompts((200, 150, 180, 90), seed=1), 16)
    before, after = balancedness(llm)
    assert before < 0.75 and after > before + 0.15


def test_ranks_need_equally_many_slots(engine: Callable[..., LLM]) -> None:
    with pytest.raises(VLLMValidationError, match="num_redundant_experts 3 .* choose 0 or that"):
        engine(
            tiny_model("mixtral"),
            tensor_parallel_size=2,
            eplb_config={"num_redundant_experts": 3},
        )
