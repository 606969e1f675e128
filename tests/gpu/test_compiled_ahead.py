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


@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_kernels_are_compiled_ahead_and_never_while_serving(tmp_path: Path, family: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
        "TRITON_CACHE_DIR": str(tmp_path),
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
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["ahead"]) > 20
    assert found["not ahead"] == [] and found["late"] == []
