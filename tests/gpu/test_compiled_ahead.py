# SPDX-License-Identifier: Apache-2.0
"""A start compiles its kernels ahead of their first launch, and serving compiles none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
import torch
from tiny_models import tiny_model
from vllm import LLM, SamplingParams
from vllm.kernels.triton import compile_log

llm = LLM(str(tiny_model(sys.argv[1], torch.bfloat16)), dtype="bfloat16", max_model_len=2560,
          max_num_seqs=24, enable_prefix_caching=False, kv_cache_memory_bytes=256 * 2**20)
start = compile_log.compilations()
for temperature in (0.0, 0.7):
    for lengths in ([1], [2], [3, 17], [64], [65, 200, 7], [9] * 24, [1000], [2500]):
        prompts = [{"prompt_token_ids": [5 + i % 90 for i in range(n)]} for n in lengths]
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=4, top_p=0.9, top_k=20)
        llm.generate(prompts, params, use_tqdm=False)
late = compile_log.compiled()[len(start):]
print(json.dumps({"ahead": [one.kernel for one in start if one.ahead],
                  "not ahead": [one.kernel for one in start if not one.ahead], "late": late}))
"""


def start(family: str, folder: Path) -> dict[str, list[str]]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, family],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_kernels_are_compiled_ahead_and_never_while_serving(tmp_path: Path, family: str) -> None:
    """By the first start, which finds them, and by the second, which has read of them."""
    first = start(family, tmp_path)
    assert len(first["ahead"]) > 20
    assert first["not ahead"] == [] and first["late"] == []
    [plan] = (tmp_path / "vllm" / "kernel_plans").iterdir()
    made = plan.stat().st_mtime_ns
    second = start(family, tmp_path)
    assert sorted(second["ahead"]) == sorted(first["ahead"])
    assert second["not ahead"] == [] and second["late"] == []
    assert plan.stat().st_mtime_ns == made, "it was used, not made again"


def test_an_incomplete_plan_is_noticed_and_made_anew(tmp_path: Path) -> None:
    start("llama", tmp_path)
    [path] = (tmp_path / "vllm" / "kernel_plans").iterdir()
    plan = json.loads(path.read_text())
    missing = plan["variants"].pop()
    path.write_text(json.dumps(plan))
    found = start("llama", tmp_path)["not ahead"]
    assert found == [missing[0].rpartition(".")[2]] and not path.exists()
    assert start("llama", tmp_path)["not ahead"] == []
    assert missing in json.loads(path.read_text())["variants"]
