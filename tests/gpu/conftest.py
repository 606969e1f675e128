# SPDX-License-Identifier: Apache-2.0
"""What tests of Hopper's kernels begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm.kernels.cuda import CudaKernels


@pytest.fixture(scope="session")
def kernels() -> CudaKernels:
    """Those of a Hopper GPU, with the compiled ops; skips on another one."""
    import torch

    from vllm._extension import CUDA_LIBRARY
    from vllm.kernels.cuda import CudaKernels
    from vllm.kernels.cuda_library import HOPPER

    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip(f"the kernels need compute capability {HOPPER}")
    assert CUDA_LIBRARY.exists(), "build the CUDA ops first"
    return CudaKernels(HOPPER)
