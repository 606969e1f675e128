# SPDX-License-Identifier: Apache-2.0
"""Sums over tensor-parallel ranks: `python -m benchmarks.all_reduce [--ranks 2] [--kb 8,64,512]`.

Prints, for messages of so many kB in bfloat16, the time of one sum in microseconds (the slowest
rank's, the median of the repeats) and the bytes per second that each rank takes in and gives out,
`2 (n - 1) / n` of the message. On GPUs a graph holds many sums, one after another, as the graph of
a decode step does: two per layer. On a CPU they are called one after another.
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

from vllm.compilation.piecewise import DeviceGraph
from vllm.distributed import parallel_state
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
    return device


def _sums(device: torch.device, kb: int) -> Callable[[], None]:
    """Runs `_SUMS` of them."""
    message = torch.zeros(kb * 512, dtype=torch.bfloat16, device=device)
    group = parallel_state.get_tp_group()

    def run() -> None:
        for _ in range(_SUMS):
            group.all_reduce(message, in_place=True)

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
    rank: int, ranks: int, method: str, sizes_kb: Sequence[int], repeats: int, results: Any
) -> None:
    torch.set_num_threads(1)
    device = _join(rank, ranks, method)
    for kb in sizes_kb:
        run = _sums(device, kb)
        results.put((kb, [_time_us(run) for _ in range(repeats)]))
        del run  # a communicator does not end before the graphs that use it
    parallel_state.destroy_distributed_environment()


def measure(ranks: int, sizes_kb: Sequence[int], repeats: int) -> dict[int, float]:
    """kB of a message -> microseconds of one sum."""
    context = get_context(start_method("ranks"))
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, f"file://{folder}/store", sizes_kb, repeats, results)
        workers = [context.Process(target=_measure, args=(r, *arguments)) for r in range(ranks)]
        for worker in workers:
            worker.start()
        found: dict[int, list[list[float]]] = {kb: [] for kb in sizes_kb}
        for _ in range(ranks * len(sizes_kb)):
            kb, times = results.get(timeout=600)
            found[kb].append(times)
        for worker in workers:
            worker.join()
    return {
        kb: median(max(at_once) for at_once in zip(*times, strict=True))
        for kb, times in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kb", default=",".join(map(str, _KB)), help="sizes, with commas")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args(arguments)
    sizes = [int(kb) for kb in options.kb.split(",")]
    print(f"{'kB':>6} {'us':>9} {'GB/s':>8}")
    for kb, us in measure(options.ranks, sizes, options.repeats).items():
        crossing = 2 * (options.ranks - 1) / options.ranks * kb * 1024
        print(f"{kb:>6} {us:>9.1f} {crossing / us / 1e3:>8.2f}")


if __name__ == "__main__":
    main()
