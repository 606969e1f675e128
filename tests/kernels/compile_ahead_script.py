# SPDX-License-Identifier: Apache-2.0
"""Notes launches, compiles them in parallel, and prints what happened (JSON)."""

import json
import sys

import torch
import triton
import triton.language as tl

from tests.kernels import no_gpu  # noqa: F401
from vllm.kernels.triton import compile_log
from vllm.kernels.triton.compile_ahead import ParallelCompilation, noted_launches

CPU = torch.device("cpu")


@triton.jit(do_not_specialize=["count"])
def copy(x, y, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < count), mask=i < count)


@triton.jit
def broken(x):
    tl.store(x, tl.no_such_function(x))


def launch(count: int, block: int) -> None:
    x = torch.zeros(count)
    copy[(1,)](x, x, count, BLOCK=block)


with noted_launches() as first:
    for count in (1, 3, 16, 100):
        launch(count, 64)
    launch(3, 128)
ParallelCompilation(first, CPU).wait()
with noted_launches() as again:
    broken[(1,)](torch.zeros(1))
try:
    ParallelCompilation(again, CPU).wait()
    error = ""
except triton.CompilationError as caught:
    error = str(caught)
ParallelCompilation(again, CPU).settle()
json.dump(
    {
        "noted": [one.kernel for one in first],
        "compiled": compile_log.compiled(),
        "ahead": all(one.ahead for one in compile_log.compilations()),
        "cached": [one.cached for one in compile_log.compilations()],
        "in memory": len(copy.device_caches[0][0]),
        "error": error,
    },
    sys.stdout,
)
