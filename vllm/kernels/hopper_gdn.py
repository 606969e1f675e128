# SPDX-License-Identifier: Apache-2.0
"""Stages of the gated delta rule in CUDA C++ for Hopper: `csrc/cuda/hopper/gdn_*.cu`.

They take bfloat16 activations and heads of 128; everything else goes to the Triton kernels, whose
inputs and outputs are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vllm.kernels.cuda_library import CudaOps
from vllm.kernels.hopper_gdn_decode import hopper_decode
from vllm.kernels.hopper_gdn_factors import chunk_factors
from vllm.kernels.hopper_gdn_scan import scan
from vllm.model_executor.layers.fla.ops.gated_delta_rule.intra import ChunkFactors
from vllm.model_executor.layers.fla.ops.gated_delta_rule.problem import ChunkedProblem

FactorsOp = Callable[[ChunkedProblem], ChunkFactors]
ScanOp = Callable[[ChunkedProblem, ChunkFactors, Tensor], None]
DecodeOp = Callable[..., None]


@dataclass(frozen=True)
class HopperGdn:
    """The stages there are; None leaves one to Triton.

    `chunk_factors` stands for `intra_chunk` where `takes_factors`, `scan` for `inter_chunk` where
    `takes_scan`, `decode` (`hopper_decode`) for a decode step's kernels where `takes_decode`.
    """

    chunk_factors: FactorsOp | None = None
    scan: ScanOp | None = None
    decode: DecodeOp | None = None


OPS = CudaOps(
    what="gated delta rule",
    why="shorter on Hopper; the kernels are compiled for these alone",
    instead_of="Triton",
    chosen="vllm_cuda for bfloat16 and heads of 128, Triton for others",
)


def find_hopper_gdn(capability: tuple[int, int]) -> HopperGdn | None:
    """The stages for a device of this compute capability, or None; the choice is recorded."""
    return HopperGdn(chunk_factors, scan, hopper_decode) if OPS.choose(capability) else None
