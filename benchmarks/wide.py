# SPDX-License-Identifier: Apache-2.0
"""Matmuls of many tokens beside their norm: cuBLAS, and the tiles of `kernels/wide_shapes.py`.

    PYTHONPATH=. python benchmarks/wide.py [--tokens 8192,256] [--seconds 0.2] [--rounds 2]

Weights of Qwen3.5-4B. Those that read the residual stream follow its norm, those that end a branch
are followed by the addition and the norm; tiles add on their own. All take turns of `--seconds`,
for a matmul's power lowers the clocks of what comes after it: microseconds of a matmul and a norm
in a CUDA graph of several over different weights, the best turn of each.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from vllm.kernels.triton.norm import fused_add_rms_norm, rms_norm
from vllm.kernels.wide import find_wide_ops
from vllm.kernels.wide_shapes import TILES

BF16 = torch.bfloat16
HIDDEN = 2560
#: rows of the weights that read the residual stream, columns of those that end a branch
READING, ENDING = (12352, 10240), (9216, 4096)
TOKENS = "64,128,192,256,320,384,448,512,1024,2048,4096,8192"
WEIGHTS = 3
EPS = 1e-6

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Step = Callable[[Tensor], object]


def of_tile(place: int) -> Matmul:
    def matmul(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
        op = torch.ops.vllm_cuda.wide_linear.default
        overlap = torch.cuda.is_current_stream_capturing()
        out: Tensor = op(x, weight, residual, overlap, place, TILES[place].group)
        return out

    return matmul


def reading_step(x: Tensor, norm: Tensor, matmul: Matmul | None) -> Step:
    def step(weight: Tensor) -> object:
        y = rms_norm(x, norm, EPS)
        return torch.nn.functional.linear(y, weight) if matmul is None else matmul(y, weight, None)

    return step


def ending_step(x: Tensor, residual: Tensor, norm: Tensor, matmul: Matmul | None) -> Step:
    def step(weight: Tensor) -> object:
        if matmul is None:
            return fused_add_rms_norm(torch.nn.functional.linear(x, weight), residual, norm, EPS)
        return rms_norm(matmul(x, weight, residual), norm, EPS)

    return step


def captured(step: Step, weights: list[Tensor]) -> torch.cuda.CUDAGraph:
    step(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights * 2:
            step(weight)
    return graph


def turn_us(graph: torch.cuda.CUDAGraph, seconds: float) -> float:
    """Microseconds of a replay, over about so many seconds."""
    replays, us = 2, 0.0
    for last in (False, True):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        us = start.elapsed_time(end) * 1e3 / replays
        if not last:
            replays = max(2, int(seconds * 1e6 / us))
    return us


def compare(n: int, k: int, m: int, seconds: float, rounds: int) -> None:
    x = torch.randn(m, k, device="cuda").to(BF16)
    residual = torch.randn(m, HIDDEN, device="cuda").to(BF16)
    norm = torch.ones(HIDDEN, dtype=BF16, device="cuda")
    weights = [
        torch.empty(n, k, dtype=BF16, device="cuda").normal_(0, k**-0.5) for _ in range(WEIGHTS)
    ]
    matmuls: dict[str, Matmul | None] = {"cuBLAS": None}
    for place, tile in enumerate(TILES):
        matmuls[f"{tile.tokens}x{tile.outputs}/{tile.rows}{tile.columns}"] = of_tile(place)
    graphs = {
        who: captured(
            reading_step(x, norm, matmul)
            if k == HIDDEN
            else ending_step(x, residual, norm, matmul),
            weights,
        )
        for who, matmul in matmuls.items()
    }
    best = dict.fromkeys(graphs, float("inf"))
    for _ in range(rounds):
        for who, graph in graphs.items():
            best[who] = min(best[who], turn_us(graph, seconds) / (2 * WEIGHTS))
    print(f"{n:5d} x {k:4d} {m:5d}", *(f"{who} {us:.1f}" for who, us in best.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if find_wide_ops(torch.cuda.get_device_capability()) is None:
        raise SystemExit("the kernel needs Hopper and the CUDA ops: see VLLM_TARGET_DEVICE=cuda")
    shapes = [(n, HIDDEN) for n in READING] + [(HIDDEN, k) for k in ENDING]
    for n, k in shapes:
        for m in args.tokens.split(","):
            compare(n, k, int(m), args.seconds, args.rounds)


if __name__ == "__main__":
    main()
