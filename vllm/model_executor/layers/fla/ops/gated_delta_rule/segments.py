# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The scan of long sequences in segments that run at the same time.

First what each segment starts from (`segment_starts.py`), then the plain scan, for which segments
are sequences that continue from these states.
"""

from collections.abc import Callable
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem
from vllm.model_executor.layers.fla.ops.gated_delta_rule.scan_segments import ScanSegments
from vllm.model_executor.layers.fla.ops.gated_delta_rule.segment_starts import segment_starts
from vllm.utils.math_utils import cdiv

#: fills `out` and updates the pool, from the chunks' factors
Scan = Callable[[ChunkedProblem, ChunkFactors, Tensor], None]


@triton.jit
def _keep_kernel(
    states_ptr,
    pool_ptr,
    index_ptr,
    starts_ptr,
    firsts_ptr,
    stride_block,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of a state, value heads, sequences): the last segments' states to the pool."""
    head, seq = tl.program_id(1), tl.program_id(2)
    index = tl.load(index_ptr + seq).to(tl.int64)
    first = tl.load(firsts_ptr + seq)
    last = tl.load(firsts_ptr + seq + 1) - 1
    empty = tl.load(starts_ptr + first) == tl.load(starts_ptr + last + 1)
    if (index < 0) | empty:
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(states_ptr + (last.to(tl.int64) * HEADS + head) * SIZE + i, mask=i < SIZE)
    tl.store(pool_ptr + index * stride_block + head * SIZE + i, state, mask=i < SIZE)


def scan_in_segments(
    p: ChunkedProblem,
    factors: ChunkFactors,
    segments: ScanSegments,
    out: Tensor,
    scan: Scan,
) -> None:
    """`scan(p, factors, out)` up to rounding, with the sequences of `p` cut as `segments` say."""
    states = segment_starts(p, factors, segments)
    pieces = replace(
        p,
        ssm_state=states,
        state_indices=segments.indices,
        has_initial_state=segments.carried,
        query_start_loc=segments.starts,
        chunk_offsets=segments.chunk_offsets,
    )
    scan(pieces, factors, out)
    _keep(p, segments, states)


def _keep(p: ChunkedProblem, segments: ScanSegments, states: Tensor) -> None:
    heads, size, block = p.v.shape[1], p.head_v_dim * p.head_k_dim, 1024
    _keep_kernel[(cdiv(size, block), heads, p.num_seqs)](
        states,
        p.ssm_state,
        p.state_indices,
        segments.starts,
        segments.firsts,
        p.ssm_state.stride(0),
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
    )
