# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Matmuls of 1 to 64 tokens at Qwen3.5-4B's sizes: cuBLAS, Triton, and ours, which are
`csrc/cuda/skinny.cu` up to 8 tokens and `csrc/cuda/hopper/narrow.cu` beyond.

    PYTHONPATH=. python benchmarks/skinny.py [--tokens 1,8,32] [--only down,step]

A time is that of one matmul in a CUDA graph of many over different weights (1 GB), the way a step
runs them; gate_up counts with its activation. The Triton kernel is the best of its tiles at that
size. The last lines are all matmuls of a decode step, 32 layers and lm_head, each reading the
result of the one before; with norms, on a residual stream.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.cuda import CudaKernels
from vllm.kernels.residual_stream import Norm, ResidualStream
from vllm.utils.math_utils import next_power_of_2

GB_PER_S = 4300.0
BF16 = torch.bfloat16
LAYERS, HIDDEN, FFN, VOCAB = 32, 2560, 9216, 248320
SHAPES = {
    "out": (HIDDEN, 4096),
    "down": (HIDDEN, FFN),
    "qkv": (10240, HIDDEN),
    "in_proj": (12352, HIDDEN),
    "gate_up": (2 * FFN, HIDDEN),
    "lm_head": (VOCAB, HIDDEN),
}
POOL_ELEMENTS = 1 << 29
# (weight rows, columns, warps, stages)
TRITON_TILES = [(16, 128, 4, 6), (16, 256, 4, 4), (16, 256, 8, 6), (32, 128, 4, 6), (32, 256, 8, 4)]

Linear = Callable[[Tensor, Tensor], Tensor]


@triton.jit(do_not_specialize=["M"])
def _triton_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token, col = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        x = tl.load(x_ptr + token[:, None] * K + start + col[None, :], token[:, None] < M, 0.0)
        w = tl.load(w_ptr + row[:, None].to(tl.int64) * K + start + col[None, :])
        sums = tl.dot(x, w.T, sums)
    tl.store(out_ptr + token[:, None] * N + row[None, :], sums, token[:, None] < M)


def triton_linear(x: Tensor, weight: Tensor, tile: tuple[int, int, int, int]) -> Tensor:
    block_n, block_k, num_warps, num_stages = tile
    m, (n, k) = len(x), weight.shape
    out = x.new_empty(m, n)
    _triton_kernel[(n // block_n,)](
        *(x, weight, out, m, n, k, max(16, next_power_of_2(m)), block_n, block_k),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def graph_us(run: Callable[[], object], replays: int = 5) -> float:
    """Mean microseconds of a graph's replay."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        start.record(stream)
        for _ in range(replays):
            graph.replay()
        end.record(stream)
        end.synchronize()
    return start.elapsed_time(end) * 1e3 / replays


def over(weights: list[Tensor], x: Tensor, op: Linear) -> float:
    """Microseconds of one op in a graph over all the weights."""

    def run() -> None:
        for weight in weights:
            op(x, weight)

    return graph_us(run) / len(weights)


def best_triton(weights: list[Tensor], x: Tensor) -> tuple[float, str]:
    times = []
    for tile in TRITON_TILES:
        try:
            times.append((over(weights, x, partial(triton_linear, tile=tile)), str(tile)))
        except triton.runtime.errors.OutOfResources:
            continue
    return min(times)


def time_shapes(tokens: list[int], names: list[str]) -> None:
    pool = torch.empty(POOL_ELEMENTS, dtype=BF16, device="cuda").normal_(0, 0.02)
    cublas, ours = CudaKernels(), our_kernels()
    for name, (n, k) in SHAPES.items():
        if name not in names:
            continue
        count = max(1, min(32, POOL_ELEMENTS // (n * k)))
        if n * k > POOL_ELEMENTS:
            pool = torch.empty(n * k, dtype=BF16, device="cuda").normal_(0, 0.02)
        weights = [pool[i * n * k : (i + 1) * n * k].view(n, k) for i in range(count)]
        for m in tokens:
            x = torch.randn(m, k, dtype=BF16, device="cuda")
            triton_us, tile = best_triton(weights, x) if name != "lm_head" else (0.0, "-")
            times = {
                "cuBLAS": over(weights, x, partial(linear, cublas, name == "gate_up")),
                "Triton": triton_us,
                "ours": over(weights, x, partial(linear, ours, name == "gate_up")),
            }
            line = "  ".join(
                f"{who} {us:6.1f} us {n * k * 2e-3 / us / GB_PER_S if us else 0:4.0%}"
                for who, us in times.items()
            )
            print(f"{name:8s} m={m:2d}  {line}  {tile}", flush=True)


def linear(kernels: CudaKernels, gated: bool, x: Tensor, weight: Tensor) -> Tensor:
    op = kernels.linear_silu_and_mul if gated else kernels.linear
    return op(x, weight, None)


def our_kernels() -> CudaKernels:
    return CudaKernels(torch.cuda.get_device_capability())


def make_step() -> list[tuple[str, Tensor]]:
    """Every weight of a step, in order."""

    def layers() -> Iterator[tuple[str, Tensor]]:
        for layer in range(LAYERS):
            for name in ("qkv" if layer % 4 == 3 else "in_proj", "out", "gate_up", "down"):
                yield name, weight_of(name)
        yield "lm_head", weight_of("lm_head")

    return list(layers())


def weight_of(name: str) -> Tensor:
    n, k = SHAPES[name]
    return torch.empty(n, k, dtype=BF16, device="cuda").normal_(0, k**-0.5)


def run_step(
    kernels: CudaKernels, weights: list[tuple[str, Tensor]], x: Tensor, norms: bool
) -> Tensor:
    if not norms:
        for name, weight in weights:
            x = linear(kernels, name == "gate_up", x[:, : weight.shape[1]], weight)
        return x
    stream = ResidualStream(x)
    norm = Norm(torch.zeros(HIDDEN, dtype=BF16, device="cuda"), 1e-6, one_plus=True)
    for name, weight in weights:
        if name in ("out", "down"):
            x = x[:, : weight.shape[1]]
            stream = kernels.linear_add(x, weight, None, stream.residual)
        else:
            gated = name == "gate_up"
            op = kernels.norm_linear_silu_and_mul if gated else kernels.norm_linear
            x, total = op(stream, norm, weight, None)
            stream = ResidualStream(total)
    return x


def time_step(tokens: list[int]) -> None:
    weights = make_step()
    total = sum(weight.numel() * 2e-3 for _, weight in weights)
    for m in tokens:
        x = torch.randn(m, HIDDEN, dtype=BF16, device="cuda")
        for norms in (False, True):
            line = "  ".join(
                f"{who} {graph_us(partial(run_step, kernels, weights, x, norms)):6.0f} us"
                for who, kernels in (("cuBLAS", CudaKernels()), ("ours", our_kernels()))
            )
            title = "step" + (" with norms" if norms else "")
            print(f"{title:16s} m={m:2d}  {line}  floor {total / GB_PER_S:.0f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", default="1,8,16,17,32,64")
    parser.add_argument("--only", default=",".join([*SHAPES, "step"]))
    args = parser.parse_args()
    tokens = [int(m) for m in args.tokens.split(",")]
    names = args.only.split(",")
    time_shapes(tokens, names)
    if "step" in names:
        time_step(tokens)


if __name__ == "__main__":
    main()
