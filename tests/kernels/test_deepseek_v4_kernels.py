# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 through the kernels that it has on GPUs, in the interpreter. On a GPU tests/parity
runs them compiled."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import hf_reference_logits, tiny_model
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.kernels.cuda import CudaKernels
from vllm.platforms import current_platform

pytestmark = pytest.mark.slow
#: what the model is made of, but for norms and products of matrices
OPS = (
    *("route_experts", "run_experts", "clamped_swiglu"),
    *("connect_streams", "join_streams", "collapse_streams"),
    *("compress", "choose_entries", "compressed_attention"),
)
IDS = list(range(40, 92))


def test_logits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two pieces, then decodes."""
    if device != "cpu":
        pytest.skip("runs the interpreter")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    kernels = CudaKernels()
    for op in OPS:
        monkeypatch.setattr(current_platform.kernels, op, getattr(kernels, op))
    path = tiny_model("deepseek_v4")
    llm = LLM(
        model=str(path),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_logprobs=-1,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=32 * 2**20,
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=-1)
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=IDS)], params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    expected = hf_reference_logits(path, IDS + tokens[:-1]).log_softmax(-1)
    assert tokens == expected[len(IDS) - 1 :].argmax(-1).tolist()
    rows = [row for row in output.prompt_logprobs or [] if row is not None]
    found = torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])
    assert float((found - expected[: len(found)]).abs().max()) < 1e-5
    llm.shutdown()
