# SPDX-License-Identifier: Apache-2.0
"""What one rank of `benchmarks.all_reduce` does: it joins the others and times its sums.

Processes are started with it by name, so it is in a module of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vllm.compilation.piecewise import DeviceGraph
from vllm.distributed import parallel_state
from vllm.kernels.residual_stream import Norm
from vllm.platforms import current_platform

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


def measure_rank(
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
