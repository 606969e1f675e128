# SPDX-License-Identifier: Apache-2.0
"""Two engines in one process, used in turn and at the same time from two threads."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extraction_options import extraction
from tests.tiny_models import tiny_model
from tests.v1.engine.fakes import FakeExecutor, make_vllm_config
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt, decisions
from vllm.config import CompilationConfig, KVTransferConfig, StructuredOutputsConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import Counter

PROMPTS = [TokensPrompt(prompt_token_ids=list(range(1, 20 + i))) for i in range(4)]


@pytest.fixture(autouse=True)
def log_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what tests before these decided outside any engine."""
    monkeypatch.setattr(decisions.PROCESS, "_records", {})


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
        keywords |= extraction(storage)
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


def chosen(llm: LLM) -> dict[str, str]:
    return {decision.what: decision.chosen for decision in llm.explain().decisions}


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


def test_what_is_resolved_stays_out_of_what_the_user_gave() -> None:
    given = {
        "compilation_config": CompilationConfig(max_cudagraph_capture_size=4),
        "kv_transfer_config": KVTransferConfig(kv_connector="X", kv_role="kv_both"),
        "structured_outputs_config": StructuredOutputsConfig(),
    }
    before = copy.deepcopy(given)
    args = EngineArgs(model=str(tiny_model("llama")), disable_hybrid_kv_cache_manager=True, **given)
    config = args.create_engine_config()
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    assert given == before
    for name, value in given.items():
        assert getattr(config, name) is not value


def test_decisions_are_of_the_engine_asked(
    engines: list[LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its configuration, core, worker and connector, and of the process."""
    decisions.PROCESS.record("for all engines", "a", "a test")
    with caplog.at_level(logging.INFO, "vllm"):
        make(engines, "llama", tmp_path)
        make(engines, "qwen3_5", num_gpu_blocks_override=7, enable_sleep_mode=True)
        extracting, hybrid = map(chosen, engines)
    assert "hidden-state file space" in extracting and "hidden-state file space" not in hybrid
    for what in ("mamba_ssm_cache_dtype", "arena pages"):
        assert what in hybrid and what not in extracting
    assert extracting["state arena"] != hybrid["state arena"]
    for what in ("for all engines", "async_scheduling", "attention backend"):
        assert extracting[what] == hybrid[what]
    of_process = {decision.what for decision in decisions.decisions()}
    assert "for all engines" in of_process
    assert not of_process & {"async_scheduling", "attention backend", "state arena"}
    logged = [record.message for record in caplog.records if record.name == "vllm.decisions"]
    for what in ("async_scheduling", "attention backend", "state arena"):
        assert sum(line.startswith(f"{what}: ") for line in logged) == len(engines)

    engines[1].sleep(1)
    assert ["sleep level 1" in chosen(llm) for llm in engines] == [False, True]


@pytest.mark.usefixtures("forking")
def test_metrics_and_decisions_of_two_asynchronous_engines() -> None:
    async def generated(engine: AsyncLLM) -> None:
        async for _ in engine.generate([30, 31], SamplingParams(max_tokens=8), "r"):
            pass

    async def main() -> list[float]:
        await generated(pair[0])
        return [
            metric.value
            for engine in pair
            for metric in engine.get_metrics()
            if isinstance(metric, Counter) and metric.name == "vllm:generation_tokens"
        ]

    pair = []
    try:
        for pages in (40, 50):
            config = make_vllm_config(num_blocks=pages)
            pair.append(AsyncLLM(config, FakeExecutor))
        counts = asyncio.run(main())
        assert counts[0] > 0 and counts[1] == 0
        for engine, count in zip(pair, counts, strict=True):
            text = engine.metrics_text().decode()
            assert text.count("# TYPE vllm:generation_tokens_total counter") == 1
            assert f'_tokens_total{{engine="0",model_name="fake-model"}} {float(count)}\n' in text
        arenas = [{d.what: d.chosen for d in e.vllm_config.decisions.decisions()} for e in pair]
        assert arenas[0]["state arena"] != arenas[1]["state arena"]
        assert "state arena" not in {d.what for d in decisions.decisions()}
    finally:
        for engine in pair:
            engine.shutdown()


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
