# SPDX-License-Identifier: Apache-2.0
"""A long prompt of a hybrid model, scanned in segments and not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
import torch
from tiny_models import tiny_model
from vllm import LLM, SamplingParams
from vllm.kernels.triton import compile_log

llm = LLM(str(tiny_model("qwen3_5", torch.bfloat16)), dtype="bfloat16", max_model_len=4000,
          max_num_seqs=4, max_num_batched_tokens=4096, enable_prefix_caching=False,
          recurrent_prefill_split=sys.argv[1], kv_cache_memory_bytes=64 * 2**20)
started = len(compile_log.compilations())
prompt = [(7 * i + i // 90) % 250 for i in range(3900)]
params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
[result] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
[top] = result.outputs[0].logprobs
[chosen] = [d.chosen for d in llm.explain().decisions if d.what == "recurrent prefill split"]
print(json.dumps({"chosen": chosen, "compiled": compile_log.compiled(),
                  "late": compile_log.compiled()[started:],
                  "top": {token: entry.logprob for token, entry in top.items()}}))
"""


def answer(split: str) -> dict[str, Any]:
    """What was decided and compiled, and the likeliest tokens after the prompt."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, split],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_segments_change_results_within_rounding() -> None:
    whole, split = answer("off"), answer("auto")
    assert (whole["chosen"], split["chosen"]) == ("off", "on")
    assert "_join_kernel" in split["compiled"] and "_join_kernel" not in whole["compiled"]
    assert whole["late"] == split["late"] == []
    shared = whole["top"].keys() & split["top"].keys()
    assert len(shared) >= 4
    # Logits between 4 and 8 lie 1/32 apart in bf16.
    assert all(abs(whole["top"][token] - split["top"][token]) < 1 / 16 for token in shared)
