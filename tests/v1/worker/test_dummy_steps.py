# SPDX-License-Identifier: Apache-2.0
"""Steps of made-up requests do not run ahead of the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tests.tiny_models import tiny_model
from vllm import LLM
from vllm.model_executor.layers.moe import mixtures_of
from vllm.model_executor.models.causal_lm import DecoderForCausalLM
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.worker import warm_up
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.warm_up import DummyBatch, run_batch
from vllm.v1.worker.worker import Worker


def test_each_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else warm-up would fill staged arrays whose copies are still queued."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(str(tiny_model("llama")), max_model_len=64, kv_cache_memory_bytes=2**22)
    waits: list[None] = []
    monkeypatch.setattr(type(current_platform), "synchronize", lambda self: waits.append(None))
    batch = DummyBatch(2, 3, 0, SamplingParams(temperature=0.0, max_tokens=2))
    llm.collective_rpc(lambda worker: run_batch(worker.model_runner, batch))
    # A prefill and a decode.
    assert len(waits) == 2
    llm.llm_engine.engine_core.shutdown()


def test_a_rehearsal_runs_one_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama's layers are all alike: the first, which has no branch to add, and another one."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(str(tiny_model("llama")), max_model_len=64, kv_cache_memory_bytes=2**22)
    batch = DummyBatch(2, 3, 0, SamplingParams(temperature=0.0, max_tokens=2), decode=False)
    monkeypatch.setattr(warm_up, "_batches", lambda runner: [batch])

    def layers_run(worker: Worker, step: Callable[[ModelRunner], None]) -> list[int]:
        runner = worker.model_runner
        ran: list[int] = []
        assert isinstance(runner.model, DecoderForCausalLM)
        layers = list(runner.model.model.layers)

        def note(module: nn.Module, args: object, output: object) -> None:
            if module in layers:
                ran.append(layers.index(module))

        # A hook on one layer would make it a kind of its own.
        with register_module_forward_hook(note):
            step(runner)
        return ran

    def both(worker: Worker) -> tuple[list[int], list[int]]:
        rehearsed = layers_run(worker, lambda runner: warm_up._rehearse(runner, True))
        return rehearsed, layers_run(worker, lambda runner: run_batch(runner, batch))

    assert llm.collective_rpc(both) == [([0, 1], [0, 1, 2, 3])]
    llm.llm_engine.engine_core.shutdown()


def test_no_experts_count_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the model's nor the drafter's."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = str(tiny_model("qwen3_moe"))
    drafter = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    llm = LLM(
        model,
        max_model_len=64,
        kv_cache_memory_bytes=2**22,
        expert_counts=True,
        speculative_config=drafter,
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def counts(worker: Worker) -> list[list[int]]:
        models = worker.model_runner.models
        mixtures = [mixture for model in models for mixture in mixtures_of(model)]
        return [one.counts.tolist() for one in mixtures if one.counts is not None]

    llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    (before,) = llm.collective_rpc(counts)
    assert len(before) == 6 and all(map(sum, before)), "drafters' experts count, too"
    llm.collective_rpc(lambda worker: run_batch(worker.model_runner, DummyBatch(2, 3, 0, params)))
    assert llm.collective_rpc(counts) == [[[0] * 8] * 6]
    llm.llm_engine.engine_core.shutdown()
