# SPDX-License-Identifier: Apache-2.0
"""Processes that start at the same time with an empty cache; prints what each compiled (JSON)."""

import json
import multiprocessing
import sys
from typing import Any

import torch

from tests.kernels import no_gpu  # noqa: F401
from vllm.kernels.activation.triton import _activation_kernel, silu_and_mul
from vllm.kernels.triton import compile_log
from vllm.kernels.triton.compile_ahead import ParallelCompilation, Variant, noted_launches

PROCESSES = 3


def start(rank: int, variants: list[Variant], together: Any, results: Any) -> None:
    together.wait()
    ParallelCompilation(variants, torch.device("cpu")).wait()
    done = compile_log.compilations()
    results.put((rank, [one.cached for one in done], len(_activation_kernel.device_caches[0][0])))


with noted_launches() as variants:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        silu_and_mul(torch.zeros(3, 256, dtype=dtype))
        silu_and_mul(torch.zeros(3, 250, dtype=dtype))
fork = multiprocessing.get_context("fork")
together, results = fork.Barrier(PROCESSES), fork.SimpleQueue()
ranks = [
    fork.Process(target=start, args=(rank, variants, together, results))
    for rank in range(PROCESSES)
]
for one in ranks:
    one.start()
found = sorted(results.get() for _ in ranks)
for one in ranks:
    one.join()
json.dump({"variants": len(variants), "found": found}, sys.stdout)
