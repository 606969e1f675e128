# SPDX-License-Identifier: Apache-2.0
"""Sums over tensor-parallel ranks: `python -m benchmarks.all_reduce [--ranks 2] [--kb 8,64,512]`.

Prints, for messages of so many kB in bfloat16, the time of one sum in microseconds (the slowest
rank's, the median of the repeats): the library's, on GPUs that share memory our own, and both with
the residual addition and norm that follow (rows of `--hidden` elements), as a kernel of its own and
as part of the sum. On GPUs a graph holds many sums, one after another, as the graph of a decode
step does: two per layer. On a CPU they are called one after another.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from vllm.compilation.piecewise import DeviceGraph
from vllm.distributed import parallel_state
from vllm.kernels.residual_stream import Norm
from vllm.platforms import current_platform
from vllm.utils.start_method import start_method

_KB = (8, 16, 32, 64, 128, 256, 512)
_SUMS = 64


def _join(rank: int, ranks: int, method: str) -> torch.device:
    current_platform.prepare_collectives()
    parallel_state.init_distributed_environment(
        ranks, rank, method, backend=current_platform.dist_backend
    )
    parallel_state.initialize_model_parallel(ranks)
    if not current_platform.is_cuda():
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    parallel_state.share_memory()
    return device


def _variants(device: torch.device, kb: int, hidden: int) -> dict[str, Callable[[], object]]:
    """Name -> one sum of a message of `kb`."""
    tokens = max(1, kb * 512 // hidden)
    message = torch.zeros(kb * 512, dtype=torch.bfloat16, device=device)
    rows, residual = (message.new_zeros(tokens, hidden) for _ in range(2))
    norm = Norm(message.new_zeros(hidden), 1e-6, True)
    group = parallel_state.get_tp_group()
    kernels, peers = current_platform.kernels, group.peer_sums

    def library(x: torch.Tensor) -> None:
        dist.all_reduce(x, group=group.device_group)

    def library_then_norm() -> None:
        library(rows)
        kernels.fused_add_rms_norm(rows, residual, norm.weight, norm.eps, one_plus=True)

    found: dict[str, Callable[[], object]] = {
        current_platform.dist_backend: lambda: library(message)
    }
    if peers is not None and peers.takes(message):
        found["peers"] = lambda: peers.sum(message)
    found["then norm"] = library_then_norm
    if peers is not None and peers.takes_norm(rows, residual):
        found["with norm"] = lambda: peers.sum_add_norm(rows, residual, norm)
    return found


def _many(device: torch.device, one: Callable[[], object]) -> Callable[[], None]:
    """Runs `_SUMS` of them."""

    def run() -> None:
        for _ in range(_SUMS):
            one()

    run()  # the library connects what messages of this size take
    if device.type == "cpu":
        return run
    graph = DeviceGraph(torch.cuda.graph_pool_handle())
    graph.begin()
    try:
        run()
    finally:
        graph.end()
    return graph.replay


def _time_us(run: Callable[[], None]) -> float:
    """Of one sum; all ranks begin at once."""
    parallel_state.get_tp_group().barrier()
    current_platform.synchronize()
    began = time.perf_counter()
    run()
    current_platform.synchronize()
    return (time.perf_counter() - began) / _SUMS * 1e6


def _measure(
    rank: int,
    ranks: int,
    method: str,
    sizes_kb: Sequence[int],
    hidden: int,
    repeats: int,
    results: Any,
) -> None:
    torch.set_num_threads(1)
    device = _join(rank, ranks, method)
    for kb in sizes_kb:
        times = {}
        for name, one in _variants(device, kb, hidden).items():
            run = _many(device, one)
            times[name] = [_time_us(run) for _ in range(repeats)]
            del run  # a communicator does not end before the graphs that use it
        results.put((kb, times))
    parallel_state.destroy_distributed_environment()


def measure(
    ranks: int, sizes_kb: Sequence[int], hidden: int, repeats: int
) -> dict[int, dict[str, float]]:
    """kB of a message -> way -> microseconds of one sum."""
    context = get_context(start_method("ranks"))
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, f"file://{folder}/store", sizes_kb, hidden, repeats, results)
        workers = [context.Process(target=_measure, args=(r, *arguments)) for r in range(ranks)]
        for worker in workers:
            worker.start()
        found: dict[int, list[dict[str, list[float]]]] = {kb: [] for kb in sizes_kb}
        for _ in range(ranks * len(sizes_kb)):
            kb, times = results.get(timeout=600)
            found[kb].append(times)
        for worker in workers:
            worker.join()
    return {kb: _slowest(of_ranks) for kb, of_ranks in found.items()}


def _slowest(of_ranks: list[dict[str, list[float]]]) -> dict[str, float]:
    """The median over repeats of the slowest rank's time."""
    return {
        name: median(max(at_once) for at_once in zip(*(one[name] for one in of_ranks), strict=True))
        for name in of_ranks[0]
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kb", default=",".join(map(str, _KB)), help="sizes, with commas")
    parser.add_argument("--hidden", type=int, default=4096, help="elements of a norm's row")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args(arguments)
    sizes = [int(kb) for kb in options.kb.split(",")]
    found = measure(options.ranks, sizes, options.hidden, options.repeats)
    names = list(next(iter(found.values())))
    print(" ".join([f"{'kB':>6}", *(f"{name:>10}" for name in names)]))
    for kb, us in found.items():
        print(" ".join([f"{kb:>6}", *(f"{us[name]:>10.1f}" for name in names)]))


if __name__ == "__main__":
    main()
