# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled ops: `torch.ops.vllm_cpu` and `torch.ops.vllm_cuda`."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).with_name("_C_cpu.so")
CUDA_LIBRARY = Path(__file__).with_name("_C_cuda.so")


def _load(library: Path, ops: str, remedy: str) -> None:
    if not library.exists():
        raise RuntimeError(f"the {ops} ops are not built: {library} is missing. {remedy}")
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise RuntimeError(
            f"{library} does not load with torch {torch.__version__} (it needs torch >= 2.11 and"
            f" this machine's architecture): {error}"
        ) from error


@cache
def load_cpu_ops() -> None:
    """Register `torch.ops.vllm_cpu`, once per process.

    Raises `RuntimeError` when the library was not built or does not fit this torch.
    """
    _load(
        LIBRARY,
        "CPU",
        "Run `python setup.py build_ext --inplace`, or install a wheel built with"
        " VLLM_TARGET_DEVICE=cpu",
    )


def cpu_ops() -> Any:
    """`torch.ops.vllm_cpu`, loaded."""
    load_cpu_ops()
    return torch.ops.vllm_cpu


@cache
def load_cuda_ops() -> None:
    """Register `torch.ops.vllm_cuda`, once per process; needs neither a GPU nor a CUDA torch.

    Raises `RuntimeError` when the library was not built or does not fit this torch.
    """
    _load(
        CUDA_LIBRARY,
        "CUDA",
        "Run `VLLM_TARGET_DEVICE=cuda python setup.py build_ext --inplace` where nvcc is",
    )
