# SPDX-License-Identifier: Apache-2.0
"""Prefills of Kimi delta attention in chunks: the two stages in Triton."""

from vllm.model_executor.layers.fla.ops.kda.chunk_factors import chunk_factors
from vllm.model_executor.layers.fla.ops.kda.chunk_scan import scan_chunks
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill


def run_chunked(p: KdaPrefill) -> None:
    """See `naive.kda_prefill`."""
    if len(p.chunk_indices):
        scan_chunks(p, chunk_factors(p))
