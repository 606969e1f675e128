# SPDX-License-Identifier: Apache-2.0
"""`Kernels` for NVIDIA GPUs, in Triton and where that falls short in CUDA C++.

Importing this needs Triton but no GPU.
"""

from vllm.kernels.interface import Kernels


class CudaKernels(Kernels):
    """Every op is one to three launches whose grids follow from host integers alone."""

    platform = "cuda"
