# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in CUDA C++ for Hopper: `csrc/cuda/hopper/gdn_*.cu`.

It takes bfloat16 activations and heads of 128; everything else goes to the Triton kernels, whose
inputs and outputs are the same.
"""

from __future__ import annotations

from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.registry import Implementation
from vllm.model_executor.layers.fla.ops.gated_delta_rule.chunk import run_chunked
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper_decode import (
    hopper_decode,
    takes_decode,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper_factors import (
    chunk_factors,
    takes_factors,
)
from vllm.model_executor.layers.fla.ops.gated_delta_rule.hopper_scan import scan, takes_scan
from vllm.model_executor.layers.fla.ops.gated_delta_rule.inter import inter_chunk
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import intra_chunk
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import GdnPrefill


def takes_prefill(p: GdnPrefill) -> bool:
    """Whether one of the two stages is compiled for this."""
    return takes_factors(p.chunked) or takes_scan(p.chunked, p.out)


def hopper_prefill(p: GdnPrefill) -> None:
    """The chunked form, a stage in Triton where no compiled one takes the problem."""
    run_chunked(
        p.chunked,
        p.out,
        p.segments,
        make_factors=chunk_factors if takes_factors(p.chunked) else intra_chunk,
        scan=scan if takes_scan(p.chunked, p.out) else inter_chunk,
    )


OPS = CudaOps(
    what="gated delta rule",
    why="shorter on Hopper; the kernels are compiled for these alone",
    instead_of="Triton",
    chosen="vllm_cuda for bfloat16 and heads of 128, Triton for others",
)
gdn_prefill = Implementation(hopper_prefill, takes_prefill, OPS)
gdn_decode = Implementation(hopper_decode, takes_decode, OPS)
