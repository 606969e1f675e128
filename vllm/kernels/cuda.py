# SPDX-License-Identifier: Apache-2.0
"""`Kernels` for NVIDIA GPUs, in Triton and where that falls short in CUDA C++.

Importing this needs Triton but no GPU.
"""

from torch import Tensor

from vllm.kernels.hopper_gdn import HopperGdn, find_hopper_gdn
from vllm.kernels.interface import Kernels
from vllm.kernels.triton import gdn
from vllm.model_executor.layers.mamba.ops.causal_conv1d.kernel import conv_prefill


class CudaKernels(Kernels):
    """Every op is one to three launches whose grids follow from host integers alone.

    `hopper` holds the stages of the gated delta rule that are not Triton's, by default those that
    a GPU of this `capability` runs.
    """

    platform = "cuda"

    def __init__(
        self, capability: tuple[int, int] | None = None, *, hopper: HopperGdn | None = None
    ) -> None:
        super().__init__(capability)
        if hopper is None and capability is not None:
            hopper = find_hopper_gdn(capability)
        delta_rule = gdn.GdnOps(hopper)
        self.gdn_prefill = delta_rule.gdn_prefill  # type: ignore[method-assign]
        self.gdn_decode = delta_rule.gdn_decode  # type: ignore[method-assign]

    gdn_commit = staticmethod(gdn.gdn_commit)

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
