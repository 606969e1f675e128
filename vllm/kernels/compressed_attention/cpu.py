# SPDX-License-Identifier: Apache-2.0
"""Compressed attention on the CPU: `csrc/cpu/kernels/compressed_attention.cpp`."""

from vllm._extension import cpu_ops
from vllm.kernels.compressed_attention import (
    ChooseProblem,
    CompressedAttentionProblem,
    CompressProblem,
)

_ops = cpu_ops()
_compress = _ops.compress.default
_choose_entries = _ops.choose_entries.default
_compressed_attention = _ops.compressed_attention.default


def compress(p: CompressProblem) -> None:
    """See `naive.compress`."""
    _compress(
        p.tokens.cache,
        p.tokens.block_table,
        p.entries.cache,
        p.entries.block_table,
        p.positions,
        p.slot_mapping,
        p.ratio,
        p.overlap,
        p.norm_weight,
        p.eps,
        p.cos_sin,
    )


def choose_entries(p: ChooseProblem) -> None:
    """See `naive.choose_entries`."""
    _choose_entries(
        p.query,
        p.head_weights,
        p.keys.cache,
        p.keys.block_table,
        p.positions,
        p.ratio,
        p.chosen,
    )


def compressed_attention(p: CompressedAttentionProblem) -> None:
    """See `naive.compressed_attention`."""
    entries = p.entries
    _compressed_attention(
        p.query,
        p.tokens.cache,
        p.tokens.block_table,
        p.window,
        p.sinks,
        p.scale,
        p.positions,
        p.out,
        None if entries is None else entries.cache,
        None if entries is None else entries.block_table,
        p.ratio,
        p.chosen,
    )
