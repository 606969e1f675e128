# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on one GPU, at the sizes of Qwen3.5-35B-A3B, beside what the chip allows.

    python benchmarks/moe.py docs/measurements/h200_moe.json

Every token takes 8 of 256 experts, chosen evenly at random, and a shared one. `route`: from logits
to experts; `experts`: everything after that. Times are microseconds in a graph replay; weights are
rotated so that none is in the L2 cache. GB/s: the bytes of the experts that are hit, read once, per
time of `experts`; TFLOP/s: its products. `floor_us`: the longer of reading those bytes at 4.3 TB/s
and of the products at 790 TFLOP/s, as measured on an H200. Needs one GPU with 40 GiB.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from vllm.kernels.moe import ExpertsProblem, RoutingProblem, RoutingRule
from vllm.platforms import current_platform

EXPERTS, TOP_K, HIDDEN, INNER = 256, 8, 2048, 512
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 512, 2048, 8192)
#: what an H200 was measured to do
BYTES_PER_US, FLOP_PER_US = 4.3e6, 790e6
#: sets of weights, of 1.6 GB each
_SETS = 3

Layer = tuple[Tensor, Tensor]


def time_us(run: Callable[[Layer], object], layers: list[Layer]) -> float:
    """One call, averaged over the layers in turn."""
    milliseconds: float = do_bench_cudagraph(lambda: [run(one) for one in layers], rep=20)
    return 1e3 * milliseconds / len(layers)


def make_layers() -> list[Layer]:
    def weights(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5

    return [
        (weights(EXPERTS + 1, 2 * INNER, HIDDEN), weights(EXPERTS + 1, HIDDEN, INNER))
        for _ in range(_SETS)
    ]


def measure(tokens: int, layers: list[Layer]) -> dict[str, float]:
    kernels = current_platform.kernels
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(tokens, EXPERTS + 8, device="cuda", dtype=torch.bfloat16)
    problem = RoutingProblem(logits, EXPERTS, RoutingRule(TOP_K), shared="gated")
    routing = kernels.route_experts(problem)
    hit = int(routing.experts.unique().numel())
    pairs = tokens * (TOP_K + 1)

    def run(layer: Layer) -> Tensor:
        return kernels.run_experts(ExpertsProblem(x, *layer, routing))

    route = time_us(lambda _: kernels.route_experts(problem), layers)
    experts = time_us(run, layers)
    weights = 3 * INNER * HIDDEN
    return {
        "experts_hit": hit,
        "route_us": round(route, 2),
        "experts_us": round(experts, 2),
        "GB/s": round(hit * weights * 2 / experts / 1e3, 0),
        "TFLOP/s": round(2 * pairs * weights / experts / 1e6, 1),
        "floor_us": round(
            max(hit * weights * 2 / BYTES_PER_US, 2 * pairs * weights / FLOP_PER_US), 2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    args = parser.parse_args()
    layers = make_layers()
    results: dict[int, Any] = {}
    for tokens in args.tokens:
        results[tokens] = measure(tokens, layers)
        print(f"{tokens:>6} tokens", results[tokens], flush=True)
    if args.output is not None:
        gpu = torch.cuda.get_device_name()
        args.output.write_text(json.dumps({"gpu": gpu, "tokens": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
