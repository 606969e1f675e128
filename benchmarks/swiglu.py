# SPDX-License-Identifier: Apache-2.0
"""Gate, up projection and SiLU of many tokens: cuBLAS and Triton, and `csrc/cuda/hopper/swiglu.cu`.

    PYTHONPATH=. python benchmarks/swiglu.py [--tokens 8192,256] [--seconds 1] [--rounds 3]

A matmul of many tokens draws all the power a GPU may have, which lowers its clocks: a short run on
a cool GPU says little. So the two take turns of `--seconds` each, and every turn's time is printed:
microseconds of one matmul in a CUDA graph of several over different weights, and TFLOP/s of all.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from vllm.kernels.cuda import CudaKernels
from vllm.kernels.linear.swiglu import OPS, swiglu

BF16 = torch.bfloat16
#: [outputs, k]: Qwen3.5-4B, Qwen3-8B, and that on two GPUs
SHAPES = {"4B": (9216, 2560), "8B": (12288, 4096), "8B/2": (6144, 4096)}
WEIGHTS = 3

Op = Callable[[Tensor, Tensor], Tensor]


def two_launches(x: Tensor, weight: Tensor) -> Tensor:
    return CudaKernels().linear_silu_and_mul(x, weight, None)


def one_launch(x: Tensor, weight: Tensor) -> Tensor:
    return swiglu(x, weight, False)


def captured(op: Op, x: Tensor, weights: list[Tensor]) -> torch.cuda.CUDAGraph:
    op(x, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            op(x, weight)
    return graph


def turn_us(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Microseconds of a replay, over about so many seconds."""
    replays = 1
    for last in (False, True):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        us = start.elapsed_time(end) * 1e3 / replays
        if not last:
            replays = max(1, int(seconds * 1e6 / us))
    return us


def compare(name: str, m: int, seconds: float, rounds: int) -> None:
    n, k = SHAPES[name]
    x = torch.randn(m, k, dtype=BF16, device="cuda")
    weights = [
        torch.empty(2 * n, k, dtype=BF16, device="cuda").normal_(0, k**-0.5) for _ in range(WEIGHTS)
    ]
    ops = {"cuBLAS + Triton": two_launches, "ours": one_launch}
    graphs = {who: captured(op, x, weights) for who, op in ops.items()}
    turns: dict[str, list[float]] = {who: [] for who in ops}
    for _ in range(rounds):
        for who, graph in graphs.items():
            turns[who].append(turn_us(graph, seconds) / WEIGHTS)
    for who, times in turns.items():
        mean = sum(times) / rounds
        flops = 4e-6 * m * n * k / mean
        each = " ".join(f"{us:.1f}" for us in times)
        print(f"{name:5s} {m:5d} {who:16s} {mean:7.1f} us {flops:4.0f} TFLOP/s  {each}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", default="8192,4096,2048,1024,512,256,128,64,32")
    parser.add_argument("--only", default="", help="one shape: " + ", ".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not OPS.choose(torch.cuda.get_device_capability()):
        raise SystemExit("the kernel needs Hopper and the CUDA ops: see VLLM_TARGET_DEVICE=cuda")
    for name in SHAPES:
        for m in args.tokens.split(","):
            if args.only in ("", name):
                compare(name, int(m), args.seconds, args.rounds)


if __name__ == "__main__":
    main()
