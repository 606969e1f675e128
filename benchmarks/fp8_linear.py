# SPDX-License-Identifier: Apache-2.0
"""Products with float8 weights beside 16-bit ones, at the sizes of a 4B Qwen3.5.

    python benchmarks/fp8_linear.py docs/measurements/h200_fp8_linear.json

Times are microseconds of one product in a graph replay, activations quantised on the way; weights
are rotated so that none is in the L2 cache. `rows`: a scale per row of the weight; `block`: per
128 x 128 block. Needs one GPU of compute capability 8.9 or higher.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from vllm.kernels.fp8 import FP8, GROUP
from vllm.platforms import current_platform

SHAPES = {
    "gate_up_proj": (18432, 2560),
    "in_proj": (12288, 2560),
    "qkv_proj": (10240, 2560),
    "down_proj": (2560, 9216),
    "o_proj": (2560, 4096),
}
TOKENS = (1, 8, 16, 32, 64, 256, 8192)
_ROTATED_BYTES = 200 * 2**20


def time_us(run: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """One call, averaged over the weights in turn."""
    milliseconds: float = do_bench_cudagraph(lambda: [run(w) for w in weights], rep=10)
    return round(1e3 * milliseconds / len(weights), 2)


def rotated(n: int, k: int, dtype: torch.dtype) -> list[Tensor]:
    count = max(1, _ROTATED_BYTES // (n * k * dtype.itemsize))
    return [torch.randn(n, k, device="cuda").to(dtype) for _ in range(count)]


def measure(n: int, k: int, tokens: int) -> dict[str, float]:
    kernels = current_platform.kernels
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    row_scale = torch.full((n,), 0.01, device="cuda")
    blocks = torch.full((n // GROUP, k // GROUP), 0.01, device="cuda")
    per_row = blocks.repeat_interleave(GROUP, 0).t().contiguous()
    result = {"bf16": time_us(lambda w: kernels.linear(x, w, None), rotated(n, k, x.dtype))}
    weights = rotated(n, k, FP8)
    result["rows"] = time_us(lambda w: kernels.linear_fp8(x, w, row_scale, None), weights)
    result["block"] = time_us(
        lambda w: kernels.linear_fp8_block(x, w, per_row, None, block_scale=blocks), weights
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    args = parser.parse_args()
    results = {}
    for name, (n, k) in SHAPES.items():
        results[name] = {tokens: measure(n, k, tokens) for tokens in args.tokens}
        print(name, results[name], flush=True)
    if args.output is not None:
        gpu = torch.cuda.get_device_name()
        args.output.write_text(json.dumps({"gpu": gpu, "us": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
