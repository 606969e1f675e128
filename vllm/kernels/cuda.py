# SPDX-License-Identifier: Apache-2.0
"""`Kernels` for NVIDIA GPUs, in Triton and where that falls short in CUDA C++.

Importing this needs Triton but no GPU.
"""

import torch
from torch import Tensor, nn

from vllm.kernels import cuda_fp8
from vllm.kernels.composed import ComposedLinears
from vllm.kernels.hopper_attention import ShortAttentionOp
from vllm.kernels.hopper_gdn import HopperGdn
from vllm.kernels.residual_stream import Norm, ResidualStream
from vllm.kernels.skinny import SkinnyOps, can_add, can_normalise, is_skinny
from vllm.kernels.swiglu import SwigluOp, takes_swiglu
from vllm.kernels.triton import activation, attention, cache, fused_fp8, gdn, norm, rope
from vllm.model_executor.layers.mamba.ops.causal_conv1d.kernel import conv_prefill


class CudaKernels(ComposedLinears):
    """Every op is one to three launches whose grids follow from host integers alone.

    `skinny` multiplies few tokens where `is_skinny`, cuBLAS others. `hopper` holds the stages of
    the gated delta rule that are not Triton's. `swiglu` makes gate, up projection and SiLU one
    launch where `takes_swiglu`.
    """

    def __init__(
        self,
        skinny: SkinnyOps | None = None,
        hopper: HopperGdn | None = None,
        swiglu: SwigluOp | None = None,
        short_attention: ShortAttentionOp | None = None,
    ) -> None:
        self._skinny = skinny
        self._swiglu = swiglu
        self.paged_attention = attention.AttentionOps(short_attention).paged_attention
        delta_rule = gdn.GdnOps(hopper)
        self.gdn_prefill = delta_rule.gdn_prefill
        self.gdn_decode = delta_rule.gdn_decode

    linear_fp8 = staticmethod(cuda_fp8.linear_fp8)
    linear_fp8_block = staticmethod(cuda_fp8.linear_fp8_block)
    silu_and_mul_fp8 = staticmethod(fused_fp8.silu_and_mul_fp8)
    fused_add_rms_norm_fp8 = staticmethod(fused_fp8.fused_add_rms_norm_fp8)
    rms_norm = staticmethod(norm.rms_norm)
    fused_add_rms_norm = staticmethod(norm.fused_add_rms_norm)
    gated_rms_norm = staticmethod(norm.gated_rms_norm)
    silu_and_mul = staticmethod(activation.silu_and_mul)
    mul_sigmoid = staticmethod(activation.mul_sigmoid)
    qk_norm_rope_cache = staticmethod(rope.qk_norm_rope_cache)
    write_kv_cache = staticmethod(cache.write_kv_cache)
    write_rows = staticmethod(cache.write_rows)
    gdn_commit = staticmethod(gdn.gdn_commit)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._skinny is not None and is_skinny(x, weight):
            return self._skinny.linear(x, weight, bias, _overlaps())
        return nn.functional.linear(x, weight, bias)

    def linear_silu_and_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear_silu_and_mul`; one launch where an op takes them, else two."""
        if self._skinny is not None and is_skinny(x, weight):
            return self._skinny.linear_silu_and_mul(x, weight, bias, _overlaps())
        if self._swiglu is not None and takes_swiglu(x, weight, bias):
            return self._swiglu(x, weight, _overlaps())
        return super().linear_silu_and_mul(x, weight, bias)

    def linear_add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
    ) -> ResidualStream:
        """See `Kernels.linear_add`; added where a matmul of ours writes it."""
        if self._skinny is not None and is_skinny(x, weight) and can_add(residual, x):
            out = self._skinny.linear(x, weight, bias, _overlaps(), residual=residual)
            return ResidualStream(out)
        return super().linear_add(x, weight, bias, residual)

    def norm_linear(
        self, stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.norm_linear`; one launch for few tokens that are added up already."""
        skinny, x = self._skinny_of_norm(stream, norm, weight), stream.residual
        if skinny is not None:
            return skinny.linear(x, weight, bias, _overlaps(), norm=norm), x
        return super().norm_linear(stream, norm, weight, bias)

    def norm_linear_silu_and_mul(
        self, stream: ResidualStream, norm: Norm, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.norm_linear_silu_and_mul`; one launch where `norm_linear` is."""
        skinny, x = self._skinny_of_norm(stream, norm, weight), stream.residual
        if skinny is not None:
            return skinny.linear_silu_and_mul(x, weight, bias, _overlaps(), norm=norm), x
        return super().norm_linear_silu_and_mul(stream, norm, weight, bias)

    def _skinny_of_norm(
        self, stream: ResidualStream, norm: Norm, weight: Tensor
    ) -> SkinnyOps | None:
        """The ops if they take the norm along with the matmul."""
        x = stream.residual
        if stream.branch is None and is_skinny(x, weight) and can_normalise(norm, x):
            return self._skinny
        return None

    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_state: Tensor,
        state_indices: Tensor,
        has_initial_state: Tensor,
        query_start_loc: Tensor,
        *,
        out: Tensor,
    ) -> None:
        """See `Kernels.causal_conv1d`."""
        conv_prefill(
            x, weight, bias, conv_state, state_indices, has_initial_state, query_start_loc, out
        )


def _overlaps() -> bool:
    """Whether launches may overlap: in a graph, where no kernel writes a weight."""
    return torch.cuda.is_current_stream_capturing()
