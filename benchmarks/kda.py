# SPDX-License-Identifier: Apache-2.0
"""Check Kimi delta attention against the fp64 reference on a GPU, then time it.

    PYTHONPATH=. python benchmarks/kda.py [--no-check]

Medians of graph replays of launches one after another, bf16, heads of 128, states larger than the
L2 cache together. Prefill: a prompt without a cached prefix; the bytes are those of q, k, v, the
decays' projections and the output, read or written once. Decode: rows commit every eight tokens, an
eighth of them in the step; the bytes are the states read, those written, what the journal gives and
takes, and the convolution's inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import triton

from tests.kernels.cases import error_ratio
from tests.kernels.test_kda import Decoder, prefill, wide
from vllm.kernels.cuda import CudaKernels
from vllm.kernels.journal import Journal
from vllm.kernels.naive import NaiveKernels
from vllm.model_executor.layers.fla.ops.kda.problem import KdaDecode

BF16 = torch.bfloat16
DIM = 128
COMMIT = 8
LAUNCHES = 10
PEAK_GB_PER_S = 4800.0

kernels = CudaKernels(torch.cuda.get_device_capability())


def time_us(run: Callable[[], None]) -> float:
    """Median microseconds of a launch, from replays of a graph of several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    replay = float(triton.testing.do_bench(graph.replay, rep=40, return_mode="median"))
    return 1e3 * replay / LAUNCHES


def report(name: str, us: float, num_bytes: float) -> None:
    rate = num_bytes / us * 1e-3
    line = f"{name:44s} {us:9.1f} us {num_bytes * 1e-6:9.1f} MB {rate:7.0f} GB/s"
    print(f"{line} {rate / PEAK_GB_PER_S:6.1%} of 4.8 TB/s", flush=True)


def time_prefill(lengths: list[int], heads: int) -> None:
    problem = prefill(lengths, [False] * len(lengths), (heads, DIM, DIM), "cuda", BF16)
    us = time_us(lambda: kernels.kda_prefill(problem))
    name = f"prefill, {len(lengths)} x {lengths[0]} tokens, {heads} heads"
    report(name, us, 5.0 * sum(lengths) * heads * DIM * 2)


def journal(num_seqs: int, heads: int) -> Journal:
    """As in the middle of serving: rows have 0 to 7 tokens pending, those with 7 commit."""

    def random(*inner: int) -> torch.Tensor:
        return torch.rand(num_seqs, COMMIT - 1, *inner, device="cuda")

    steps = [[i, i % COMMIT, int(i % COMMIT == COMMIT - 1), 0] for i in range(num_seqs)]
    return Journal(
        torch.tensor(steps, dtype=torch.int32, device="cuda"),
        torch.zeros(num_seqs, dtype=torch.int32, device="cuda"),
        random(heads, DIM) * 0.1,
        random(heads, DIM),
        random(heads, DIM),
        torch.zeros(num_seqs, 0, 3 * heads * DIM, dtype=BF16, device="cuda"),
    )


def time_decode(num_seqs: int, heads: int, *, deferred: bool) -> None:
    decoder = Decoder(kernels, num_seqs, (heads, DIM, DIM), "cuda", dtype=BF16)
    qkv, a, b = (x[0] for x in decoder.tokens(1))
    gates = type(decoder.gates)(a, b, decoder.gates.A_log, decoder.gates.dt_bias)
    problem = KdaDecode(
        qkv,
        gates,
        decoder.weight,
        decoder.conv_state,
        decoder.state,
        decoder.indices,
        qkv.new_empty(num_seqs, heads, DIM),
        journal(num_seqs, heads) if deferred else None,
    )
    us = time_us(lambda: kernels.kda_decode(problem))
    heads_here = num_seqs * heads
    written = 1 / COMMIT if deferred else 1.0
    states = heads_here * DIM * DIM * 4 * (1 + written)
    tokens = heads_here * DIM * 2 * (3 * 7 + 2)
    entries = heads_here * 3 * DIM * 4 * ((COMMIT - 1) / 2 + 1 - written) if deferred else 0.0
    name = "journal" if deferred else "every state written"
    report(f"decode, {num_seqs} x {heads} heads, {name}", us, states + tokens + entries)


def check() -> None:
    torch.manual_seed(0)
    lengths, carried = [500, 1, 64, 129], [True, False, True, False]
    problem = prefill(lengths, carried, (8, DIM, DIM), "cuda", BF16, padding=1)
    exact = wide(problem)
    kernels.kda_prefill(problem)
    NaiveKernels().kda_prefill(exact)
    tokens = sum(lengths)
    found = error_ratio(problem.out[:tokens], exact.out[:tokens])
    print(f"prefill differs from fp64 by {found:.1e} of the output's norm", flush=True)
    if not found < 7e-3:
        raise SystemExit("the prefill is wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-check", action="store_true")
    if not parser.parse_args().no_check:
        check()
    for count, heads in ((1, 96), (8, 96), (1, 32), (4, 32), (8, 32), (1, 8)):
        time_prefill([8192 // count] * count, heads)
    for num_seqs, heads in ((64, 32), (64, 96), (256, 32)):
        time_decode(num_seqs, heads, deferred=True)
        time_decode(num_seqs, heads, deferred=False)


if __name__ == "__main__":
    main()
