# SPDX-License-Identifier: Apache-2.0
"""Two engines in one process, used in turn and at the same time from two threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import tiny_model
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.config import CompilationConfig
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.v1.metrics.reader import Counter

PROMPTS = [TokensPrompt(prompt_token_ids=list(range(1, 20 + i))) for i in range(4)]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LLM]]:
    """Filled by the test; shut down after it."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    made: list[LLM] = []
    yield made
    for engine in made:
        engine.llm_engine.shutdown()
    gc.collect()


def make(engines: list[LLM], family: str, storage: Path | None = None, **keywords: Any) -> LLM:
    """An engine in this process; with `storage` one that extracts hidden states."""
    if storage is not None:
        keywords["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}},
        }
        keywords["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": storage},
        }
    engines.append(
        LLM(
            str(tiny_model(family)),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=8,
            kv_cache_memory_bytes=32 << 20,
            **keywords,
        )
    )
    return engines[-1]


def generate(llm: LLM, max_tokens: int = 8) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return llm.generate(PROMPTS, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def rows(outputs: list[RequestOutput]) -> list[torch.Tensor]:
    paths = [(output.kv_transfer_params or {})["hidden_states_path"] for output in outputs]
    return [load_hidden_states(path)["hidden_states"] for path in paths]


def test_at_the_same_time(engines: list[LLM]) -> None:
    """Layers find their own step's metadata, whichever engine computes beside them."""
    pair = [make(engines, "llama"), make(engines, "qwen3_5")]
    expected = [tokens(generate(llm)) for llm in pair]
    with ThreadPoolExecutor(len(pair)) as threads:
        for _ in range(10):
            runs = [threads.submit(generate, llm) for llm in pair]
            assert [tokens(run.result()) for run in runs] == expected


def test_extraction_beside_extraction(engines: list[LLM], tmp_path: Path) -> None:
    first = make(engines, "llama", tmp_path / "first")
    expected = rows(generate(first))
    second = make(engines, "llama", tmp_path / "second")
    for llm in (first, second, first):
        for got, want in zip(rows(generate(llm)), expected, strict=True):
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-6)
    second.llm_engine.shutdown()
    assert len(rows(generate(first))) == len(PROMPTS)


def test_extraction_beside_a_plain_engine(engines: list[LLM], tmp_path: Path) -> None:
    plain = make(engines, "llama")
    expected = tokens(generate(plain))
    extracting = make(engines, "llama", tmp_path)
    assert tokens(generate(plain)) == expected
    assert all(len(one) for one in rows(generate(extracting)))
    assert plain.collective_rpc(lambda worker: has_kv_transfer_group()) == [False]
    assert extracting.collective_rpc(lambda worker: has_kv_transfer_group()) == [True]
    assert not has_kv_transfer_group()


def test_one_compilation_config_for_two_engines(engines: list[LLM]) -> None:
    """The table of an engine's layers is not part of what the user configured."""
    config = CompilationConfig()
    first = make(engines, "llama", compilation_config=config)
    expected = tokens(generate(first))
    second = make(engines, "llama", compilation_config=config)
    second.llm_engine.shutdown()
    assert tokens(generate(first)) == expected


def test_metrics_are_of_the_engine_asked(engines: list[LLM]) -> None:
    first = make(engines, "llama", disable_log_stats=False)
    generate(first)
    second = make(engines, "llama", disable_log_stats=False)
    counts = [
        metric.value
        for llm in (first, second)
        for metric in llm.get_metrics()
        if isinstance(metric, Counter) and metric.name == "vllm:generation_tokens"
    ]
    assert counts == [8 * len(PROMPTS), 0]


def test_prefix_hashes_outlive_the_start_of_another_engine(engines: list[LLM]) -> None:
    first = make(engines, "llama")
    generate(first)
    make(engines, "llama")
    assert all(output.num_cached_tokens for output in generate(first))
