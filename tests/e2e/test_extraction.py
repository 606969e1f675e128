# SPDX-License-Identifier: Apache-2.0
"""Hidden-state extraction with the real engine, against transformers and against itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import hf_residual_streams, tiny_model
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.outputs import RequestOutput

pytestmark = [pytest.mark.slow, pytest.mark.extraction, pytest.mark.usefixtures("forking")]

FAMILIES = ["llama", "qwen3", "qwen3_5"]
NUM_LAYERS = 4
#: of the norm of all rows; fp32 sums in another order, amplified by the models' sharp attention
RELATIVE_ERROR = 2e-5


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(n)] for n in lengths]


@contextmanager
def engine(family: str, path: Path, ids: list[int] | None = None, **options: Any) -> Iterator[LLM]:
    """An extracting engine of a tiny model in fp32."""
    settings: dict[str, Any] = {"max_model_len": 256, "dtype": "float32", "seed": 0} | options
    extra = {"shared_storage_path": path} | settings.pop("extra", {})
    if ids is None:
        ids = list(range(NUM_LAYERS + 1))
    llm = LLM(
        str(tiny_model(family)),
        kv_cache_memory_bytes=settings.pop("kv_cache_memory_bytes", 64 << 20),
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": extra,
        },
        **settings,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.shutdown()


def generate(
    llm: LLM, token_ids: list[list[int]], max_tokens: int = 1, **kv_params: Any
) -> list[RequestOutput]:
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": kv_params} if kv_params else None,
    )
    return llm.generate([{"prompt_token_ids": ids} for ids in token_ids], params, use_tqdm=False)


def stored(output: RequestOutput) -> tuple[Tensor, list[int]]:
    """`hidden_states [n, columns, hidden]` and the token ids, by the connector's own reader."""
    assert output.kv_transfer_params is not None
    path = output.kv_transfer_params["hidden_states_path"]
    data = load_hidden_states(path)
    cleanup_hidden_states(path)
    assert torch.isfinite(data["hidden_states"]).all()
    assert len(data["hidden_states"]) == len(data["token_ids"])
    return data["hidden_states"], data["token_ids"].tolist()


def rows_of(llm: LLM, token_ids: list[list[int]]) -> list[Tensor]:
    """Every prompt's rows, with the token ids checked."""
    rows = []
    for ids, output in zip(token_ids, generate(llm, token_ids), strict=True):
        hidden, stored_ids = stored(output)
        assert stored_ids == ids
        rows.append(hidden)
    return rows


def check_against_hf(family: str, token_ids: list[int], rows: Tensor, ids: list[int]) -> None:
    streams = hf_residual_streams(tiny_model(family), token_ids)
    for column, layer_id in enumerate(sorted(ids)):
        expected = streams[layer_id]
        error = (rows[:, column] - expected).norm() / expected.norm()
        assert error < RELATIVE_ERROR, f"{family}: id {layer_id} is off by {error:.2e}"
        if layer_id == 0:
            assert torch.equal(rows[:, column], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_the_residual_stream(tmp_path: Path, family: str) -> None:
    """All ids, several lengths in one batch; then the same prompts from the prefix cache."""
    batch = prompts(1, 15, 16, 17, 64, 100, 254)
    with engine(family, tmp_path) as llm:
        first = rows_of(llm, batch)
        again = rows_of(llm, batch)
    for token_ids, rows in zip(batch, first, strict=True):
        check_against_hf(family, token_ids, rows, list(range(NUM_LAYERS + 1)))
    for cold, warm in zip(first, again, strict=True):
        error = (cold - warm).norm() / cold.norm()
        assert error < RELATIVE_ERROR
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_longest_prompt(tmp_path: Path, family: str) -> None:
    """Clients set `max_model_len` to the prompt plus one."""
    [ids] = prompts(255)
    with engine(family, tmp_path) as llm:
        [rows] = rows_of(llm, [ids])
    check_against_hf(family, ids, rows, list(range(NUM_LAYERS + 1)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_chunked_prompts(tmp_path: Path, family: str, async_scheduling: bool) -> None:
    batch = prompts(100, 7, 33, 64, 1)
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 4}
    with engine(family, tmp_path, async_scheduling=async_scheduling, **options) as llm:
        rows = rows_of(llm, batch)
    for token_ids, found in zip(batch, rows, strict=True):
        check_against_hf(family, token_ids, found, list(range(NUM_LAYERS + 1)))


@pytest.mark.parametrize("ids", [[2, 2, 1, 4], [4, 1], [4], [0]])
def test_columns_ascend_and_duplicates_stay(tmp_path: Path, ids: list[int]) -> None:
    [token_ids] = prompts(40)
    with engine("llama", tmp_path, ids) as llm:
        [rows] = rows_of(llm, [token_ids])
    assert rows.shape[1] == len(ids)
    check_against_hf("llama", token_ids, rows, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_output_tokens(tmp_path: Path, family: str) -> None:
    """Prompt and generated tokens but the last one, which never went through the model."""
    batch = prompts(20, 33)
    with engine(family, tmp_path) as llm:
        outputs = generate(llm, batch, max_tokens=12, include_output_tokens=True)
        prompt_only = generate(llm, batch, max_tokens=12)
    for token_ids, output in zip(batch, outputs, strict=True):
        rows, stored_ids = stored(output)
        generated = list(output.outputs[0].token_ids)
        assert len(generated) == 12
        assert stored_ids == [*token_ids, *generated[:-1]]
        check_against_hf(family, stored_ids, rows, list(range(NUM_LAYERS + 1)))
    for token_ids, output in zip(batch, prompt_only, strict=True):
        assert stored(output)[1] == token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_that_of_a_plain_engine(tmp_path: Path, family: str) -> None:
    batch = prompts(20, 33, 5)
    with engine(family, tmp_path) as llm:
        found = [list(o.outputs[0].token_ids) for o in generate(llm, batch, max_tokens=16)]
    plain = LLM(
        str(tiny_model(family)),
        max_model_len=256,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
    )
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    given: Any = [{"prompt_token_ids": ids} for ids in batch]
    expected = [list(o.outputs[0].token_ids) for o in plain.generate(given, params)]
    plain.llm_engine.shutdown()
    assert found == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_have_all_rows(tmp_path: Path, family: str) -> None:
    """Too little state memory for the batch: requests are preempted and computed again."""
    batch = prompts(*[60] * 6)
    options: dict[str, Any] = {"enable_prefix_caching": False, "disable_log_stats": False}
    with engine(family, tmp_path, num_gpu_blocks_override=22, **options) as llm:
        outputs = generate(llm, batch, max_tokens=120, include_output_tokens=True)
        preemptions = [m for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    assert preemptions and preemptions[0].value > 0, "nothing was preempted: the test shows nothing"
    for token_ids, output in zip(batch, outputs, strict=True):
        rows, stored_ids = stored(output)
        assert stored_ids == token_ids + list(output.outputs[0].token_ids)[:-1]
        check_against_hf(family, stored_ids, rows, list(range(NUM_LAYERS + 1)))


def test_many_requests_share_the_cache(tmp_path: Path) -> None:
    """More requests than fit at a time: blocks of finished ones are reused only once read."""
    batch = prompts(*[1 + 5 * (i % 20) for i in range(150)])
    with engine("llama", tmp_path, [1, 4], num_gpu_blocks_override=24) as llm:
        rows = rows_of(llm, batch)
    for token_ids, found in zip(batch, rows, strict=True):
        check_against_hf("llama", token_ids, found, [1, 4])


def test_unwritable_storage_fails_the_request_only(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.write_text("")
    with engine("llama", storage) as llm:
        [output] = generate(llm, prompts(10))
        assert output.outputs[0].finish_reason == "error"
        assert output.kv_transfer_params is None
        storage.unlink()
        rows_of(llm, prompts(10))


def test_shutdown_writes_what_was_promised(tmp_path: Path) -> None:
    """Files promised by the last replies exist after the engine is gone."""
    batch = prompts(*[50] * 10)
    with engine("llama", tmp_path) as llm:
        outputs = generate(llm, batch)
    for token_ids, output in zip(batch, outputs, strict=True):
        assert stored(output)[1] == token_ids


@pytest.mark.parametrize("ids, reason", [([5], "out of range"), ([-1], "out of range"), ([], "")])
def test_bad_layer_ids(tmp_path: Path, ids: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=f"eagle_aux_hidden_state_layer_ids.*{reason}"):
        with engine("llama", tmp_path, ids):
            pass
