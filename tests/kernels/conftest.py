# SPDX-License-Identifier: Apache-2.0
"""One set of tests for two machines: the Triton interpreter on a CPU, compiled code on a GPU.

The interpreter is chosen before the kernels are imported, and needs NumPy below 2.4.
"""

import os

import numpy as np
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of compiled sizes only make sense on a GPU."""
    if item.get_closest_marker("gpu") and not HAS_GPU:
        pytest.skip("needs a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """`cpu` runs in the interpreter, `cuda` compiled; a machine can do one of them."""
    if request.param == "cpu" and HAS_GPU:
        pytest.skip("Triton compiles on this machine")
    if request.param == "cpu" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6's interpreter needs NumPy below 2.4")
    return str(request.param)


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    """Activation dtypes; the interpreter's bf16 dot is wrong, so bf16 needs a GPU."""
    if request.param == "bfloat16" and device == "cpu":
        pytest.skip("bf16 needs a GPU")
    chosen = getattr(torch, request.param)
    assert isinstance(chosen, torch.dtype)
    return chosen
