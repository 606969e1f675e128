# SPDX-License-Identifier: Apache-2.0
"""Chunked gated delta rule: the two stages, and the published function interface."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm.kernels.chunks import chunk_metadata
from vllm.model_executor.layers.fla.ops.gated_delta_rule.inter import inter_chunk
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors, intra_chunk
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem
from vllm.model_executor.layers.fla.ops.gated_delta_rule.ragged_batch import flatten_batch
from vllm.model_executor.layers.fla.ops.gated_delta_rule.scan_segments import ScanSegments
from vllm.model_executor.layers.fla.ops.gated_delta_rule.segments import Scan, scan_in_segments

#: the first stage, as `intra_chunk` is one
FactorsOp = Callable[[ChunkedProblem], ChunkFactors]


def run_chunked(
    p: ChunkedProblem,
    out: Tensor,
    segments: ScanSegments | None = None,
    *,
    make_factors: FactorsOp = intra_chunk,
    scan: Scan = inter_chunk,
) -> None:
    """Fill `out [tokens, v heads, dv]` and update the state pool in the two stages, sequences cut
    into `segments`."""
    if p.num_chunks == 0:
        return
    factors = make_factors(p)
    if segments is None:
        scan(p, factors, out)
    else:
        scan_in_segments(p, factors, segments, out, scan)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`(o, final state or None)`: `q, k [B, T, k heads, dk]`, `v, o [B, T, v heads, dv]`, log
    decay `g` and `beta [B, T, v heads]`, states `[sequences, v heads, dk, dv]` fp32.

    `cu_seqlens [sequences + 1]` makes a batch of one ragged; its values are read on the host.
    `scale` defaults to `dk ** -0.5`.

    Raises:
        ValueError: `cu_seqlens` with a batch other than one, or a state of another shape.
    """
    batch = flatten_batch(q, k, v, g, beta, initial_state, cu_seqlens)
    chunk_indices, chunk_offsets = chunk_metadata(batch.starts.tolist())
    problem = ChunkedProblem(
        q=batch.q,
        k=batch.k,
        v=batch.v,
        a=batch.g,
        b=batch.beta,
        A_log=None,
        dt_bias=None,
        ssm_state=batch.state,
        state_indices=batch.state_indices,
        has_initial_state=torch.ones_like(batch.state_indices, dtype=torch.bool),
        query_start_loc=batch.starts,
        chunk_indices=chunk_indices.to(q.device),
        chunk_offsets=chunk_offsets.to(q.device),
        scale=k.shape[-1] ** -0.5 if scale is None else scale,
        l2norm=use_qk_l2norm_in_kernel,
    )
    out = torch.empty_like(batch.v)
    run_chunked(problem, out)
    final = batch.state.mT.contiguous() if output_final_state else None
    return out.view(v.shape), final
