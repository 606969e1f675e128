# SPDX-License-Identifier: Apache-2.0
"""Sampling with ids that no check has seen; to be run under compute-sanitizer:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
    python -m pytest -q tests/gpu/test_hostile_ids.py tests/kernels/test_triton_token_adjust.py \
    tests/kernels/test_triton_token_mask.py tests/kernels/test_triton_sampling.py

(PyTorch's own pool would hide a store beyond a tensor from the sanitizer.)
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.hostile_ids import FAR, NEAR, VOCAB, filtered, hostile
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import NO_TOKEN
from vllm.v1.sample.adjusted_rows import AdjustedRow, adjusted_rows
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import sample
from vllm.v1.sample.token_masks import TokenMasks

pytestmark = pytest.mark.gpu

ROWS = 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("logprobs", [None, 5])
def test_no_id_leaves_its_row(dtype, temperature, filters, logprobs):
    device = torch.device("cuda")
    params = SamplingParams(temperature=temperature, seed=1, logprobs=logprobs, **filters)
    metadata = SamplingMetadata.build([params] * ROWS, VOCAB, device)
    adjusted = adjusted_rows(
        [
            AdjustedRow(1, hostile(NEAR + FAR, device), 2),
            AdjustedRow(3, filtered(NEAR + FAR, device), 2, request=1),
        ],
        device,
    )
    assert adjusted is not None
    counts = torch.ones(2, dtype=torch.int32, device=device)
    masks = TokenMasks.dummy(torch.zeros(ROWS, VOCAB, device=device), VOCAB)
    masks.words[5] = 0
    logits = torch.randn(ROWS, VOCAB, device=device).to(dtype)
    logits[4] = float("-inf")
    for position in range(20):
        positions = torch.full((ROWS,), position, device=device)
        out = sample(logits.clone(), metadata, positions, adjusted, masks)
        adjusted.observe(out.sampled_token_ids, counts)
        tokens = out.sampled_token_ids.tolist()
        assert tokens[4] == tokens[5] == NO_TOKEN
        assert all(0 <= token < VOCAB for token in tokens[:4])
        assert tokens[1] not in (3, 9) and tokens[3] in (4, 9, 11)
        if logprobs is not None:
            assert out.logprobs is not None and out.logprobs.token_ids.min() >= 0
    torch.cuda.synchronize()
