# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, one file per concept; `vllm.kernels.cuda.CudaKernels` puts them together.

Device functions carry no annotations but `tl.constexpr`: their arguments are traced values.
"""
