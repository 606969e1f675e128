# SPDX-License-Identifier: Apache-2.0
"""The mask kernel against the torch path of the CPU."""

import pytest
import torch

from vllm.kernels.sampling import naive
from vllm.kernels.sampling.mask import BLOCK, mask_tokens


@pytest.mark.parametrize("vocab", [5, 32, 1000, BLOCK, BLOCK + 33])
def test_mask_tokens(vocab, dtype, device):
    words = torch.randint(-(2**31), 2**31 - 1, (3, -(-vocab // 32)), dtype=torch.int32)
    rows = torch.tensor([4, 0, 2])
    logits = torch.randn(6, vocab + 7).to(dtype)[:, :vocab]
    expected = logits.clone()
    naive.mask_tokens(expected, rows, words)
    assert (expected < -1e4).any()
    masked = logits.to(device)
    mask_tokens(masked, rows.to(device), words.to(device))
    assert torch.equal(masked.cpu(), expected)
