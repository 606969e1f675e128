# SPDX-License-Identifier: Apache-2.0
"""The CPU's kernels: C++ in `csrc/cpu`, vectorised for the instruction set found at run time."""

from vllm._extension import cpu_ops
from vllm.kernels.interface import Kernels


class CpuKernels(Kernels):
    """`Kernels` for float32, bfloat16 and float16 on the CPU.

    Arguments are checked in C++; a wrong dtype, shape or stride raises `RuntimeError`. Results do
    not depend on the number of threads or on what else is in the batch.
    """

    platform = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.isa: str = cpu_ops().isa()
