# SPDX-License-Identifier: Apache-2.0
"""The backend of docs/adding_a_backend.md, as printed there, runs what the package's own runs."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.docs.commands import ROOT
from tests.kernels.cases import attention_case, error_ratio, widen
from tests.tiny_models import tiny_model
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.naive import NaiveKernels
from vllm.platforms import current_platform
from vllm.utils.class_registry import resolve_class

GUIDE = (ROOT / "docs" / "adding_a_backend.md").read_text()
NAME = "plain_backend.PlainBackend"
PROMPTS = [TokensPrompt(prompt_token_ids=[7 * i % 20 + 8 for i in range(n)]) for n in (70, 50, 9)]
[NGRAM] = re.findall(r"--speculative-config '(.*?)'", GUIDE)


@pytest.fixture(scope="module", autouse=True)
def importable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    [code] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    folder = tmp_path_factory.mktemp("outside")
    (folder / "plain_backend.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_SANITIZE", "1")
        yield


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("gated", [False, True])
def test_it_computes_what_the_reference_does(window: int | None, gated: bool) -> None:
    lengths, heads = [(1, 40), (1, 7), (5, 5), (9, 60)], (4, 2, 32)
    case = attention_case(lengths, heads, torch.float32, "cpu", window=window, gated=gated)
    problem = AttentionProblem(**case)
    wide = AttentionProblem(**{name: widen(value) for name, value in case.items()})
    NaiveKernels().paged_attention(wide)
    module = importlib.import_module("plain_backend")
    starts = problem.query_start_loc.tolist()
    metadata = module.PlainMetadata(starts, 60, problem.seq_lens, problem.block_table)
    impl = module.PlainImpl(4, 32, problem.scale, 2, window)
    impl.forward(problem.query, problem.kv_cache, metadata, problem.out, problem.gate)
    assert error_ratio(problem.out, wide.out) < 5e-6


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gemma3", {}), ("qwen3_5", {"speculative_config": json.loads(NGRAM)})],
)
def test_it_serves_the_tokens_of_the_packages_own(family: str, settings: dict[str, Any]) -> None:
    """In chunks, with cached prefixes, windows, gates and drafts; free blocks are NaN."""
    found = []
    for backend in ("PAGED", NAME):
        llm = LLM(
            str(tiny_model(family)),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            kv_cache_memory_bytes=2**26,
            attention_backend=backend,
            **settings,
        )
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        found.append([llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)])
        llm.shutdown()
    paged, plain = ([[list(o.outputs[0].token_ids) for o in run] for run in runs] for runs in found)
    assert plain == paged
    assert found[1][1][0].num_cached_tokens


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("gpt_oss", {}, "PLAIN has no attention sinks; use --attention-backend PAGED"),
        ("llama", {"kv_cache_dtype": "fp8"}, "PLAIN does not read a float8 cache; use"),
    ],
)
def test_what_it_does_not_declare_is_an_error(
    family: str, settings: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "supports_fp8_cache", True)
    path = str(tiny_model(family))
    with pytest.raises(ValueError, match=says):
        LLM(path, dtype="float32", max_model_len=256, attention_backend=NAME, **settings)


def test_its_class_is_named_by_its_path() -> None:
    assert resolve_class(NAME).name == "PLAIN"
