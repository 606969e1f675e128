# SPDX-License-Identifier: Apache-2.0
"""Both Python implementations have the interface's ops and arguments, and load apart."""

import inspect
import subprocess
import sys

import pytest

from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.kernels.naive import NaiveKernels

OPS = [name for name in vars(Kernels) if not name.startswith("_")]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kernels", [NaiveKernels(), CudaKernels()])
def test_arguments_are_those_of_the_interface(kernels, op):
    declared = inspect.signature(getattr(Kernels, op)).parameters.values()
    offered = inspect.signature(getattr(kernels, op)).parameters.values()
    expected = [(p.name, p.kind, p.default) for p in declared if p.name != "self"]
    assert [(p.name, p.kind, p.default) for p in offered] == expected


def test_the_reference_loads_without_triton_kernels():
    program = (
        "import sys, vllm.kernels.naive\n"
        "assert not [m for m in sys.modules if m.startswith(('vllm.kernels.triton', 'triton.'))]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
