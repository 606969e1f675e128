# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU: `csrc/cpu/kernels/attention.cpp`."""

from vllm._extension import cpu_ops
from vllm.kernels.activation.cpu import mul_sigmoid
from vllm.kernels.attention import AttentionProblem

_paged_attention = cpu_ops().paged_attention.default


def paged_attention(p: AttentionProblem) -> None:
    """The lengths are read where the work is planned, so the two maxima have no use.

    Float8 caches are refused, so their scales have none either.
    """
    _paged_attention(
        p.query,
        p.kv_cache,
        p.block_table,
        p.seq_lens,
        p.query_start_loc,
        p.scale,
        p.sliding_window,
        p.sinks,
        p.out,
        int(p.rows),
    )
    if p.gate is not None:
        p.out.copy_(mul_sigmoid(p.out, p.gate).view(p.out.shape))
