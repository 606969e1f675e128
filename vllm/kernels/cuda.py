# SPDX-License-Identifier: Apache-2.0
"""`Kernels` for NVIDIA GPUs, in Triton. Importing this needs Triton but no GPU."""

from torch import Tensor, nn

from vllm.kernels.triton import activation, attention, cache, gdn, norm, rope
from vllm.model_executor.layers.mamba.ops.causal_conv1d.kernel import conv_prefill


class CudaKernels:
    """Every op is one to three launches whose grids follow from host integers alone."""

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

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)

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
