# SPDX-License-Identifier: Apache-2.0
"""Memory is released and restored storage by storage, whoever looks at it."""

from __future__ import annotations

import pytest
import torch

from vllm.v1.worker.sleep import ParkedMemory


@pytest.mark.parametrize("keep", [True, False])
def test_views_and_shared_storages_survive(keep: bool) -> None:
    base = torch.arange(24, dtype=torch.float32)
    view = base.as_strided((3, 2), (8, 1), 4)
    other = torch.full((5,), 7, dtype=torch.bfloat16)
    tensors = [base, base[4:], torch.nn.Parameter(other, requires_grad=False), torch.empty(0)]
    parked = ParkedMemory(tensors, keep)
    assert parked.num_bytes == 24 * 4 + 5 * 2
    assert base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    parked.restore()
    kept = torch.arange(24, dtype=torch.float32) if keep else torch.zeros(24)
    assert torch.equal(base, kept)
    assert torch.equal(other, torch.full_like(other, 7 if keep else 0))
    base[4] = -1
    assert view[0, 0] == -1, "a view made before shares the memory again"
    assert view[1].tolist() == kept[12:14].tolist()
