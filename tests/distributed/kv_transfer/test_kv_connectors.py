# SPDX-License-Identifier: Apache-2.0
"""Connectors inside the real engine: what one engine stored, the next one loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extraction_options import extraction
from tests.tiny_models import tiny_model
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.outputs import RequestOutput
from vllm.v1.metrics.reader import Gauge

pytestmark = pytest.mark.usefixtures("forking")

PROMPTS = [[(7 * i + 3 * n) % 256 for i in range(n)] for n in (1, 17, 18, 40, 100)]


@contextmanager
def engine(transfer: dict[str, Any] | None, family: str = "llama", **options: Any) -> Iterator[LLM]:
    llm = LLM(
        str(tiny_model(family)),
        max_model_len=256,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        kv_transfer_config=transfer,
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.shutdown()


def example(path: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": path},
    }


def run(llm: LLM) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


def cached(outputs: list[RequestOutput]) -> list[int | None]:
    return [o.num_cached_tokens for o in outputs]


@pytest.mark.parametrize("chunk", [None, 24])
def test_fresh_engine_continues_stored_prompts(tmp_path: Path, chunk: int | None) -> None:
    options = {} if chunk is None else {"max_num_batched_tokens": chunk, "max_num_seqs": 4}
    with engine(None) as llm:
        expected = tokens(run(llm))
    with engine(example(tmp_path), **options) as llm:
        first = run(llm)
    assert tokens(first) == expected and set(cached(first)) == {0}
    assert len(list(tmp_path.iterdir())) == 3
    with engine(example(tmp_path), **options) as llm:
        second = run(llm)
    assert tokens(second) == expected
    assert cached(second) == [0, 0, 16, 32, 96]


def test_damaged_store_is_an_error_or_computed_again(tmp_path: Path) -> None:
    with engine(example(tmp_path)) as llm:
        expected = tokens(run(llm))
    for file in tmp_path.glob("*/*.safetensors"):
        file.write_bytes(b"nothing")
    with engine(example(tmp_path)) as llm:
        reasons = [o.outputs[0].finish_reason for o in run(llm)]
    assert reasons == ["length", "length", "error", "error", "error"]
    recompute = example(tmp_path) | {"kv_load_failure_policy": "recompute"}
    with engine(recompute) as llm:
        assert tokens(run(llm)) == expected


def test_hidden_states_of_loaded_prompts(tmp_path: Path) -> None:
    """The loading child stores captured rows too, so a loaded prefix has all of them."""
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [
                example(tmp_path / "kv"),
                {
                    "kv_connector": "ExampleHiddenStatesConnector",
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {"shared_storage_path": tmp_path / "hs"},
                },
            ]
        },
    }
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}},
    }
    rows, texts, hits = [], [], []
    for _ in range(2):
        with engine(transfer, speculative_config=speculative) as llm:
            outputs = run(llm)
            paths = [(o.kv_transfer_params or {})["hidden_states_path"] for o in outputs]
            rows.append([load_hidden_states(path)["hidden_states"] for path in paths])
            texts.append(tokens(outputs))
            hits.append(cached(outputs))
    assert texts[0] == texts[1] and hits == [[0] * 5, [0, 0, 16, 32, 96]]
    for prompt, cold, warm in zip(PROMPTS, *rows, strict=True):
        assert cold.shape == warm.shape == (len(prompt), 3, 64)
        loaded = max(len(prompt) - 2, 0) // 16 * 16
        assert torch.equal(cold[:loaded], warm[:loaded])
        assert (cold - warm).norm() / cold.norm() < 2e-5


def test_metrics_have_what_happens_after_the_last_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core of this process steps on for the transfers of ended requests, and then holds
    nothing."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    extracting = extraction(tmp_path)
    with engine(extracting.pop("kv_transfer_config"), **extracting, disable_log_stats=False) as llm:
        run(llm)
        [usage] = [m for m in llm.get_metrics() if m.name == "vllm:kv_cache_usage_perc"]
        assert isinstance(usage, Gauge) and usage.value == 0


def test_recurrent_state_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="recurrent state"):
        with engine(example(tmp_path), family="qwen3_5"):
            pass
