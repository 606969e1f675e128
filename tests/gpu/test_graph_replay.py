# SPDX-License-Identifier: Apache-2.0
"""Replayed decode steps give what eager ones give, extraction included, in the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from tests.extraction_options import extraction
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)

pytestmark = pytest.mark.gpu


def _llm(monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype, **kwargs: Any) -> LLM:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return LLM(
        str(tiny_model(family, dtype)),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=512,
        max_num_seqs=24,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 * 2**20,
        **kwargs,
    )


def _outputs(
    llm: LLM, params: SamplingParams, counts: tuple[int, ...] = (1, 3, 9, 24)
) -> list[tuple[Any, ...]]:
    """Tokens and exact logprobs of batches of `counts` equally long requests."""
    results = []
    for count in counts:
        prompts = [{"prompt_token_ids": list(range(5 + i, 60 + i))} for i in range(count)]
        for output in llm.generate(prompts, params, use_tqdm=False):
            completion = output.outputs[0]
            assert completion.logprobs is not None
            logprobs = [
                entry[token].logprob
                for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
            ]
            results.append((tuple(completion.token_ids), tuple(logprobs)))
    return results


def _both(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: torch.dtype,
    counts: tuple[int, ...],
    **settings: Any,
) -> list[list[tuple[Any, ...]]]:
    """Outputs with graphs, then without."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    results = []
    for eager in (False, True):
        llm = _llm(monkeypatch, family, dtype, enforce_eager=eager, **settings)
        captured = llm.collective_rpc(lambda worker: worker.model_runner.graphs.sizes)[0]
        assert bool(captured) is not eager
        assert eager or set(counts) & {1, 8, 16, 24} <= set(captured)
        results.append(_outputs(llm, params, counts))
        llm.llm_engine.engine_core.shutdown()
    return results


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "qwen3_5"])
def test_replay_equals_eager_bit_for_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At captured sizes both sides run the very same kernels. Prefills are eager on both: in
    pieces they are padded, which test_piecewise_replay.py compares."""
    mode = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    replayed, eager = _both(
        monkeypatch, family, torch.bfloat16, (1, 8, 16, 24), compilation_config=mode
    )
    assert replayed == eager


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_padded_replay_gives_the_same_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between captured sizes a matmul may take another kernel, so bits differ but not the text."""
    replayed, eager = _both(monkeypatch, family, torch.float32, (3, 9, 21))
    for (tokens, logprobs), (expected_tokens, expected) in zip(replayed, eager, strict=True):
        assert tokens == expected_tokens
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(expected), rtol=0, atol=1e-4
        )


def test_sampling_and_penalties_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        seed=3,
        frequency_penalty=0.5,
        max_tokens=30,
        ignore_eos=True,
        logprobs=0,
    )
    outputs = []
    for eager in (False, True):
        llm = _llm(monkeypatch, "qwen3_5", torch.float32, enforce_eager=eager)
        outputs.append([tokens for tokens, _ in _outputs(llm, params)])
        llm.llm_engine.engine_core.shutdown()
    assert outputs[0] == outputs[1]


def test_extraction_through_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of generated tokens come from replayed steps."""
    ids = [0, 2, 4]
    files = []
    for eager in (False, True):
        llm = _llm(
            monkeypatch,
            "qwen3_5",
            torch.float32,
            enforce_eager=eager,
            **extraction(tmp_path, ids),
        )
        params = SamplingParams(
            temperature=0,
            max_tokens=20,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"include_output_tokens": True}},
        )
        prompts = [{"prompt_token_ids": list(range(5, 20 + i))} for i in range(5)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        paths = [o.kv_transfer_params["hidden_states_path"] for o in outputs]
        files.append([load_hidden_states(path) for path in paths])
        llm.llm_engine.engine_core.shutdown()
    for replayed, eager_file, prompt in zip(*files, prompts, strict=True):
        rows = len(prompt["prompt_token_ids"]) + 19
        assert replayed["hidden_states"].shape == (rows, len(ids), 64)
        assert replayed["token_ids"].tolist() == eager_file["token_ids"].tolist()
        torch.testing.assert_close(
            replayed["hidden_states"], eager_file["hidden_states"], rtol=1e-4, atol=1e-4
        )
