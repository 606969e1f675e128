# SPDX-License-Identifier: Apache-2.0
"""Prefills of Kimi delta attention in chunks: two stages."""

from collections.abc import Callable

from vllm.model_executor.layers.fla.ops.kda.chunk_factors import ChunkFactors, chunk_factors
from vllm.model_executor.layers.fla.ops.kda.chunk_scan import scan_chunks
from vllm.model_executor.layers.fla.ops.kda.problem import KdaPrefill

#: the stages, as `chunk_factors` and `scan_chunks` are
FactorsOp = Callable[[KdaPrefill], ChunkFactors]
Scan = Callable[[KdaPrefill, ChunkFactors], None]


def run_chunked(
    p: KdaPrefill, *, make_factors: FactorsOp = chunk_factors, scan: Scan = scan_chunks
) -> None:
    """See `naive.kda_prefill`."""
    if len(p.chunk_indices):
        scan(p, make_factors(p))
