# SPDX-License-Identifier: Apache-2.0
"""The tile map of ragged batches, and that lengths never recompile a kernel."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.cases import attention_case, conv_case, gdn_case, rope_case, starts_of
from vllm.kernels.attention import AttentionProblem
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.rotary import RotaryProblem
from vllm.kernels.triton.ragged import find_sequence, num_tiles
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnPrefill


@triton.jit
def _list_tiles_kernel(starts_ptr, out_ptr, num_seqs, BLOCK: tl.constexpr):
    seq, tile = find_sequence(starts_ptr, tl.program_id(0), num_seqs, BLOCK)
    tl.store(out_ptr + 2 * tl.program_id(0), seq)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, tile)


@pytest.mark.parametrize(
    "lengths", [[1], [0, 5, 0, 0], [16] * 3, [15, 1, 17, 0, 33, 2], [1] * 20, [0]]
)
def test_every_row_has_exactly_one_tile(lengths, device):
    starts = torch.tensor(starts_of(lengths), dtype=torch.int32, device=device)
    count = num_tiles(sum(lengths), len(lengths), 16)
    tiles = torch.empty(count, 2, dtype=torch.int32, device=device)
    _list_tiles_kernel[(count,)](starts, tiles, len(lengths), BLOCK=16)
    covered = [(s, t) for s, t in tiles.tolist() if t * 16 < lengths[s]]
    assert len(covered) == len(set(covered))
    needed = {(s, t) for s, n in enumerate(lengths) for t in range(-(-n // 16))}
    assert set(covered) == needed


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_lengths_never_recompile(device):
    """After one batch of a kind, other token counts launch without compiling anything."""
    kernels, dtype = CudaKernels(), torch.bfloat16
    compiled: list[str] = []

    def run(n: int) -> None:
        kernels.gdn_prefill(
            GdnPrefill(**gdn_case([n, n], [True, False], (4, 8, 64, 64), dtype, device))
        )
        kernels.causal_conv1d(**conv_case([n, n], [True, False], 256, dtype, device))
        kernels.qk_norm_rope_cache(RotaryProblem(**rope_case(n, (4, 2, 64), dtype, device)))
        lengths = [(n + 32, n + 32), (n, n)]
        kernels.paged_attention(
            AttentionProblem(**attention_case(lengths, (4, 2, 64), dtype, device))
        )
        kernels.rms_norm(torch.randn(n, 256, device=device), torch.ones(256, device=device), 1e-6)

    run(64)
    triton.knobs.runtime.jit_post_compile_hook = lambda **kw: compiled.append(kw["repr"])
    try:
        for n in (1, 7, 16, 33, 65, 500):
            run(n)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled
