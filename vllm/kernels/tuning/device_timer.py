# SPDX-License-Identifier: Apache-2.0
"""Timing a run on the GPU under given launch parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
from triton.errors import TritonError

from vllm.kernels.triton.compile_ahead import ParallelCompilation, noted_launches
from vllm.kernels.triton.configs import use_configs
from vllm.kernels.triton.tile_files import Configs
from vllm.kernels.tuning.workloads import Run


class DeviceTimer:
    """Medians of CUDA graph replays, the L2 cache flushed in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compile(self, alternatives: Iterable[Configs], runs: Iterable[Run]) -> None:
        """Compile what the alternatives need, in parallel; what fails is found when it is timed."""
        with noted_launches() as variants:
            for configs in alternatives:
                use_configs(self._device, configs)
                for run in runs:
                    run()
        ParallelCompilation(variants, self._device).settle()

    def __call__(self, configs: Configs, run: Run) -> float | None:
        """Microseconds; None when the kernel does not compile or needs more than the GPU has."""
        use_configs(self._device, configs)
        try:
            run()
        except TritonError:
            return None
        except RuntimeError as error:
            if "PassManager::run failed" in str(error):
                return None
            raise
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return 1e3 * float(triton.testing.do_bench(graph.replay, return_mode="median"))
