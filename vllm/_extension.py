# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled CPU ops as `torch.ops.vllm_cpu`."""

from functools import cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_C_cpu.so")


@cache
def load_cpu_ops() -> None:
    """Register `torch.ops.vllm_cpu`, once per process.

    Raises `RuntimeError` when the library was not built or does not fit this torch.
    """
    if not LIBRARY.exists():
        raise RuntimeError(
            f"the CPU ops are not built: {LIBRARY} is missing. Run `python setup.py build_ext"
            " --inplace`, or install a wheel built with VLLM_TARGET_DEVICE=cpu"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise RuntimeError(
            f"{LIBRARY} does not load with torch {torch.__version__} (it needs torch >= 2.11 and"
            f" this machine's architecture): {error}"
        ) from error
