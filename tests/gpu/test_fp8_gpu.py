# SPDX-License-Identifier: Apache-2.0
"""Float8 on a GPU: products at real sizes, engines through graphs, halved caches, sleep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import FORMATS, Format, quantise_checkpoint
from tiny_models import tiny_model
from torch import Tensor

from vllm import LLM, SamplingParams
from vllm.kernels import fp8

pytestmark = pytest.mark.gpu
GATES = ("in_proj_a", "in_proj_b")
#: one rounding to bfloat16
ROUNDED = 4e-3


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def captured(run: Callable[[], Tensor]) -> Tensor:
    """What a replay of the captured call leaves in its output."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.fill_(float("nan"))
    graph.replay()
    return out


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 300])
@pytest.mark.parametrize("n,k", [(18432, 2560), (2560, 9216), (2560, 4096), (12352, 2560)])
def test_products_at_real_sizes(n: int, k: int, tokens: int) -> None:
    """12,352 rows are no whole blocks; from 65 tokens on cuBLAS multiplies the others."""
    from vllm.kernels.cuda import CudaKernels

    torch.manual_seed(0)
    kernels = CudaKernels()
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    weight, scale = fp8.quantize_rows(torch.randn(n, k, device="cuda") / k**0.5)
    row_scale = scale[:, 0].contiguous()
    rows = fp8.as_rows(x)
    expected = rows.values.double() @ weight.double().T * rows.scale.double() * row_scale.double()
    for given in (x, rows):
        out = captured(lambda: kernels.linear_fp8(given, weight, row_scale, None))  # noqa: B023
        assert error(out, expected) < ROUNDED
    blocks = torch.rand(-(-n // 128), k // 128, device="cuda") + 0.5
    per_row = blocks.repeat_interleave(128, 0)[:n].t().contiguous()
    library = blocks if n % 128 == 0 else None
    values, groups = fp8.quantize_groups(x)
    wide = values.double() * groups.double().repeat_interleave(128, 1)
    expected = wide @ (weight.double() * per_row.double().T.repeat_interleave(128, 1)).T
    out = captured(lambda: kernels.linear_fp8_block(x, weight, per_row, None, block_scale=library))
    assert error(out, expected) < ROUNDED


def make_engine(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLM:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    defaults: dict[str, Any] = {
        "model": str(tiny_model("qwen3_5_wide", torch.bfloat16)),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 28,
        "enable_prefix_caching": False,
        "enable_sleep_mode": True,
    }
    return LLM(**(defaults | settings))


def outputs(llm: LLM) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    prompts: Any = [{"prompt_token_ids": list(range(5 + i, 60 + 2 * i))} for i in range(3)]
    found = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found]


def _page_bytes(worker: Any) -> int:
    size: int = worker.model_runner.arena.plan.page_bytes
    return size


@pytest.mark.parametrize("form", FORMATS)
def test_graphs_replay_what_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, form: Format, tmp_path: Path
) -> None:
    source = tiny_model("qwen3_5_wide", torch.bfloat16)
    path = str(quantise_checkpoint(source, tmp_path, form, GATES).path)
    graphs = make_engine(monkeypatch, model=path, kv_cache_dtype="fp8")
    found = outputs(graphs)
    for level in (1, 2):
        graphs.sleep(level)
        graphs.wake_up()
        assert outputs(graphs) == found
    graphs.llm_engine.engine_core.shutdown()
    eager = make_engine(monkeypatch, model=path, kv_cache_dtype="fp8", enforce_eager=True)
    assert outputs(eager) == found
    eager.llm_engine.engine_core.shutdown()


def test_an_fp8_cache_halves_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = []
    for dtype in ("auto", "fp8"):
        model = str(tiny_model("qwen3", torch.bfloat16))
        llm = make_engine(monkeypatch, model=model, kv_cache_dtype=dtype, enforce_eager=True)
        pages += llm.collective_rpc(_page_bytes)
        outputs(llm)
        llm.llm_engine.engine_core.shutdown()
    assert pages[0] == 2 * pages[1]


def test_sanitized_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is NaN for e4m3 as well, and nothing reads or leaves it."""
    llm = make_engine(
        monkeypatch, kv_cache_dtype="fp8", sanitize=True, enforce_eager=True, quantization="fp8"
    )
    outputs(llm)
    llm.llm_engine.engine_core.shutdown()
