# SPDX-License-Identifier: Apache-2.0
"""`Kernels` for NVIDIA GPUs, in Triton and where that falls short in CUDA C++.

Importing this needs Triton but no GPU.
"""

import torch
from torch import Tensor, nn

from vllm.kernels import cuda_fp8
from vllm.kernels.skinny import SkinnyOps, is_skinny
from vllm.kernels.triton import activation, attention, cache, fused_fp8, gdn, norm, rope
from vllm.model_executor.layers.mamba.ops.causal_conv1d.kernel import conv_prefill


class CudaKernels:
    """Every op is one to three launches whose grids follow from host integers alone.

    `skinny` multiplies few tokens where `is_skinny`; without it cuBLAS does.
    """

    def __init__(self, skinny: SkinnyOps | None = None) -> None:
        self._skinny = skinny

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
    paged_attention = staticmethod(attention.paged_attention)
    gdn_prefill = staticmethod(gdn.gdn_prefill)
    gdn_decode = staticmethod(gdn.gdn_decode)
    gdn_commit = staticmethod(gdn.gdn_commit)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._skinny is not None and is_skinny(x, weight):
            return self._skinny.linear(x, weight, bias, _overlaps())
        return nn.functional.linear(x, weight, bias)

    def linear_silu_and_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear_silu_and_mul`; one launch for few tokens, else two."""
        if self._skinny is not None and is_skinny(x, weight):
            return self._skinny.linear_silu_and_mul(x, weight, bias, _overlaps())
        return self.silu_and_mul(nn.functional.linear(x, weight, bias))

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
