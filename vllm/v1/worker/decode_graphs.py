# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of decode-only steps, one per batch size.

A graph holds the model and the language-model head; sampling and the hidden-state cache follow
outside. It reads the staged arrays, whose device side has a fixed address, so a step uploads its
arrays as always and replays. Batches are padded to the next captured size; padded rows have slot
and state index -1 and context length 0, which kernels skip.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from vllm.compilation.monitor import capturing
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.attention.backend import AttentionBackend


def graphs_forbidden(vllm_config: VllmConfig, backends: list[type[AttentionBackend]]) -> str | None:
    """Why decode steps cannot be captured, or None."""
    for backend in backends:
        if not backend.supports_full_graph:
            return f"attention backend {backend.name} plans every step on the host"
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        connector = KVConnectorFactory.get_connector_class(transfer)
        if connector.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config):
            return f"connector {transfer.kv_connector} acts on every layer"
    return None


@dataclass(frozen=True)
class CapturedDecode:
    """A graph and its outputs: `logits [size, vocab]`, captured hidden states `[size, hidden]`."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    aux: list[Tensor]


class DecodeGraphs:
    """Graphs by batch size. `sizes` ascending, none above `max_rows` (ValueError)."""

    def __init__(self, sizes: list[int], max_rows: int) -> None:
        if sizes and sizes[-1] > max_rows:
            raise ValueError(
                f"--cudagraph-capture-sizes asks for {sizes[-1]} requests, but --max-num-seqs is "
                f"{max_rows}; capture at most that"
            )
        self._sizes = sizes
        self._captured: dict[int, CapturedDecode] = {}

    @property
    def sizes(self) -> list[int]:
        """Captured batch sizes, ascending."""
        return sorted(self._captured)

    def size_for(self, num_reqs: int) -> int | None:
        """The smallest captured size that holds `num_reqs` requests, None without one."""
        if not self._captured or num_reqs > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, num_reqs)]

    def replay(self, size: int) -> CapturedDecode:
        """Run the graph of `size` on the current stream; its outputs are overwritten."""
        captured = self._captured[size]
        captured.graph.replay()
        return captured

    def capture(self, prepare: Callable[[int], Callable[[], tuple[Tensor, list[Tensor]]]]) -> None:
        """Capture `prepare(size)() -> (logits, aux)` for every size, in one memory pool.

        `prepare` uploads the step's arrays, which must stay out of the graph. Its result runs once
        before the capture, so that kernels are compiled. Largest first: smaller ones reuse memory.
        """
        if not self._sizes:
            return
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        gc.disable()
        try:
            for size in tqdm(self._sizes[::-1], desc="capturing graphs", unit="graph"):
                run = prepare(size)
                run()
                torch.cuda.current_stream().synchronize()
                graph = torch.cuda.CUDAGraph()
                with capturing():
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    logits, aux = run()
                    graph.capture_end()
                self._captured[size] = CapturedDecode(graph, logits, aux)
        finally:
            gc.enable()
