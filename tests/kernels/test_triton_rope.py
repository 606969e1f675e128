# SPDX-License-Identifier: Apache-2.0
"""Triton query and key preparation and cache writes against the fp64 reference."""

import pytest
import torch

from tests.kernels.cases import TOLERANCE, arena_cache, check, randn, rope_case, strided
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.rotary import RotaryProblem

kernels = CudaKernels()


@pytest.mark.parametrize(
    "heads, rot",
    [((4, 2, 16), 16), ((3, 1, 24), 24), ((5, 1, 24), 12), ((16, 4, 256), 64), ((2, 2, 12), 0)],
)
@pytest.mark.parametrize("gated", [False, True])
def test_shapes(heads, rot, gated, dtype, device):
    case = rope_case(6, heads, dtype, device, gated=gated, rot=rot)
    check(kernels, "qk_norm_rope_cache", case, TOLERANCE[dtype])


@pytest.mark.parametrize("normed, one_plus", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rot", [16, 32])
def test_norms(normed, one_plus, rot, dtype, device):
    case = rope_case(5, (4, 2, 32), dtype, device, normed=normed, one_plus=one_plus, rot=rot)
    check(kernels, "qk_norm_rope_cache", case, TOLERANCE[dtype])


def test_query_norm_without_key_norm(device):
    case = rope_case(5, (4, 2, 32), torch.float32, device) | dict(k_norm_weight=None)
    check(kernels, "qk_norm_rope_cache", case, TOLERANCE[torch.float32])


def test_padding_positions_are_not_read(device):
    """A position far outside the table would fault, or read another tensor."""
    case = rope_case(3, (4, 2, 16), torch.float32, device)
    case["positions"][-1] = 2**40
    q = kernels.qk_norm_rope_cache(RotaryProblem(**case))
    assert not q[:-1].isnan().any()


def test_write_kv_cache(dtype, device):
    key, value = (strided(randn(6, 2, 24, dtype=dtype, device=device)) for _ in range(2))
    cache = arena_cache(4, 2, 16, 2, 24, dtype=dtype, device=device)
    slots = torch.tensor([0, 63, -1, 17, 16, 40], device=device)
    case = dict(key=key, value=value, kv_cache=cache, slot_mapping=slots)
    check(kernels, "write_kv_cache", case, 1e-9)


@pytest.mark.parametrize("width", [20, 1500])
def test_write_rows(width, dtype, device):
    rows = strided(randn(4, 3, width, dtype=dtype, device=device))
    cache = arena_cache(3, 16, 3, width, dtype=dtype, device=device)
    slots = torch.tensor([47, -1, 0, 17], device=device)
    check(kernels, "write_rows", dict(rows=rows, cache=cache, slot_mapping=slots), 1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_blocks_beyond_two_billion_elements(device):
    """Block 2 starts at element 2^31: offsets must be 64-bit."""
    width = 16 * 2 * 16
    arena = torch.empty(2**31 + width, dtype=torch.bfloat16, device=device)
    cache = arena.as_strided((3, 16, 2, 16), (2**30, 32, 16, 1))
    rows = randn(1, 2, 16, dtype=torch.bfloat16, device=device)
    kernels.write_rows(rows, cache, torch.tensor([2 * 16 + 5], device=device))
    assert torch.equal(arena[2**31 + 5 * 32 :][:32], rows.flatten())
