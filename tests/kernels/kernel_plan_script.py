# SPDX-License-Identifier: Apache-2.0
"""A start in small: kernels as a plan says, else found by launching; prints JSON."""

import json
import sys
from pathlib import Path

import torch

from tests.kernels import no_gpu  # noqa: F401
from vllm.kernels.activation.triton import _activation_kernel, silu_and_mul
from vllm.kernels.triton import compile_log
from vllm.kernels.triton.compile_ahead import ParallelCompilation, noted_launches
from vllm.kernels.triton.kernel_plan import KernelPlan


def launch() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        silu_and_mul(torch.zeros(3, 256, dtype=dtype))


plan = KernelPlan(Path(sys.argv[1]), "this code")
variants = plan.load()
loaded = variants is not None
if variants is None:
    with noted_launches() as variants:
        launch()
    plan.store(variants)
ParallelCompilation(variants, torch.device("cpu")).wait()
json.dump(
    {
        "loaded": loaded,
        "compiled": sorted(compile_log.compiled()),
        "launched without asking the disk": sorted(_activation_kernel.device_caches[0][0]),
    },
    sys.stdout,
)
