# SPDX-License-Identifier: Apache-2.0
"""Extracted rows equal transformers' residual stream however the work is cut.

The lengths lie on and around the sizes of a block (16) and of a chunk of the recurrence (64); the
longest prompt leaves room for exactly one token (`max_model_len` = prompt + 1), as clients ask.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nightly import covering
from tests.tiny_models import hf_residual_streams, tiny_model
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.v1.metrics.reader import Counter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extraction,
    pytest.mark.parity,
    pytest.mark.usefixtures("forking"),
]

FAMILIES = ("llama", "qwen3", "qwen3_5")
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 300)
NUM_LAYERS = 4
#: embeddings, a middle layer, the last one, and what speculators' default list becomes for n = 4
LAYER_IDS = [2, 2, 1, 4, 0]
RELATIVE_ERROR = 1e-4

MakeEngine = Callable[..., LLM]


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """`make_engine(family, **llm_keywords)`: an extracting engine in this process."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engines: list[LLM] = []

    def make(family: str, layer_ids: list[int] = LAYER_IDS, **keywords: Any) -> LLM:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": max(LENGTHS) + 1,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
        }
        hf_config = {"eagle_aux_hidden_state_layer_ids": layer_ids}
        engines.append(
            LLM(
                str(tiny_model(family)),
                speculative_config={
                    "method": "extract_hidden_states",
                    "num_speculative_tokens": 1,
                    "draft_model_config": {"hf_config": hf_config},
                },
                kv_transfer_config={
                    "kv_connector": "ExampleHiddenStatesConnector",
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": {"shared_storage_path": tmp_path},
                },
                **{**settings, **keywords},
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.llm_engine.shutdown()


def as_prompts(batch: list[list[int]]) -> list[TokensPrompt]:
    return [TokensPrompt(prompt_token_ids=ids) for ids in batch]


def generate(llm: LLM, batch: list[list[int]], max_tokens: int = 1) -> list[RequestOutput]:
    """Greedy; with more than one token the output's rows are asked for too."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"include_output_tokens": max_tokens > 1}},
    )
    return llm.generate(as_prompts(batch), params, use_tqdm=False)


@lru_cache(maxsize=256)
def reference(family: str, token_ids: tuple[int, ...]) -> Tensor:
    """`[tokens, layers + 1, hidden]` of transformers."""
    return torch.stack(hf_residual_streams(tiny_model(family), list(token_ids)), dim=1)


def check(family: str, output: RequestOutput, layer_ids: list[int] = LAYER_IDS) -> None:
    """The output's file has one row per token, each within `RELATIVE_ERROR` of transformers'."""
    assert output.kv_transfer_params is not None, output.outputs[0].finish_reason
    path = output.kv_transfer_params["hidden_states_path"]
    data = load_hidden_states(path)
    cleanup_hidden_states(path)
    prompt, generated = output.prompt_token_ids, list(output.outputs[0].token_ids)
    assert prompt is not None
    token_ids = [*prompt, *generated[:-1]]
    assert data["token_ids"].tolist() == token_ids
    expected = reference(family, tuple(token_ids))[:, sorted(layer_ids)]
    assert data["hidden_states"].shape == expected.shape
    assert data["hidden_states"].dtype == torch.float32
    error = (data["hidden_states"] - expected).norm(dim=-1)
    # The embedding of the padding token is zero.
    allowed = RELATIVE_ERROR * expected.norm(dim=-1)
    assert torch.all(error <= allowed), f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize(
    ("family", "max_num_batched_tokens", "async_scheduling"),
    covering(FAMILIES, [17, 64, 8192], [True, False]),
)
def test_batched_together_and_again(
    family: str, max_num_batched_tokens: int, async_scheduling: bool, make_engine: MakeEngine
) -> None:
    """The second time the prompts come from the cache: whole blocks of attention, and all but the
    last token where recurrent state makes hits exact."""
    llm = make_engine(
        family, max_num_batched_tokens=max_num_batched_tokens, async_scheduling=async_scheduling
    )
    outputs = generate(llm, prompts())
    for output in outputs:
        check(family, output)
    again = generate(llm, prompts())
    for output in again:
        check(family, output)
    hits = [output.num_cached_tokens for output in again]
    if family == "qwen3_5":
        assert hits == [length - 1 for length in LENGTHS]
    else:
        assert hits == [(length - 1) // 16 * 16 for length in LENGTHS]


@pytest.mark.parametrize("family", FAMILIES)
def test_alone(family: str, make_engine: MakeEngine) -> None:
    llm = make_engine(family, max_num_batched_tokens=64)
    for prompt in prompts():
        check(family, generate(llm, [prompt])[0])


@pytest.mark.parametrize(
    ("family", "max_num_batched_tokens", "async_scheduling"),
    covering(FAMILIES, [17, 8192], [True, False]),
)
def test_preempted_with_output_rows(
    family: str, max_num_batched_tokens: int, async_scheduling: bool, make_engine: MakeEngine
) -> None:
    llm = make_engine(
        family,
        max_model_len=352,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=async_scheduling,
        num_gpu_blocks_override=24,
        disable_log_stats=False,
    )
    for output in generate(llm, prompts(LENGTHS[::-1]), max_tokens=48):
        check(family, output)
    [preemptions] = [m for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    assert isinstance(preemptions, Counter)
    assert preemptions.value > 0, "the arena was large enough; the test shows nothing"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shared_prefixes_and_longer_prompts(family: str, make_engine: MakeEngine) -> None:
    """Rows of a hit come from another request's blocks; those after it are computed now."""
    llm = make_engine(family, max_num_batched_tokens=64)
    [shared] = prompts((100,), seed=1)
    batch = [shared + tail for tail in prompts((1, 28, 120), seed=2)]
    for output in [*generate(llm, [shared]), *generate(llm, batch)]:
        check(family, output)
    [output] = generate(llm, [batch[-1]], max_tokens=9)
    assert output.num_cached_tokens == 208
    check(family, output)


@pytest.mark.parametrize("multiprocess", ["0", "1"])
@pytest.mark.parametrize("num_pages", [None, 24])
def test_stop_strings(
    multiprocess: str,
    num_pages: int | None,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the front end sees stop strings; the rows are still those of the reply's tokens."""
    llm = make_engine("llama", max_model_len=352)
    batch = prompts(LENGTHS[::-1])
    texts = [output.outputs[0].text for output in generate(llm, batch, max_tokens=48)]
    stops = [next(c for c in text[4:] if c.isascii() and c.isprintable()) for text in texts]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", multiprocess)
    llm = make_engine("llama", max_model_len=352, num_gpu_blocks_override=num_pages)
    lengths = [48] * len(batch)
    for _ in range(3):  # then with an own end one or two tokens after the stop string
        params = [
            SamplingParams(
                max_tokens=length,
                temperature=0,
                ignore_eos=True,
                stop=stop,
                extra_args={"kv_transfer_params": {"include_output_tokens": True}},
            )
            for length, stop in zip(lengths, stops, strict=True)
        ]
        outputs = llm.generate(as_prompts(batch), params, use_tqdm=False)
        for output, text, stop in zip(outputs, texts, stops, strict=True):
            [completion] = output.outputs
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
            assert completion.text == text[: text.index(stop)]
            check("llama", output)
        lengths = [
            len(output.outputs[0].token_ids) + 1 + (index + lengths[0]) % 2
            for index, output in enumerate(outputs)
        ]


def test_engine_in_its_own_process(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_engine("qwen3_5")
    expected = [output.outputs[0].token_ids for output in generate(llm, prompts())]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    outputs = generate(make_engine("qwen3_5"), prompts())
    for output in outputs:
        check("qwen3_5", output)
    assert [output.outputs[0].token_ids for output in outputs] == expected
