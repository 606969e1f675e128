# SPDX-License-Identifier: Apache-2.0
"""Whether the devices of this host, and of all, suit the workers."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform


def check_devices(config: VllmConfig) -> None:
    """Raises `VLLMValidationError` where this host has too few GPUs for its workers, or several
    kinds of them for workers that share layers."""
    parallel = config.parallel_config
    if config.device_config.device_type == "cpu" or parallel.world_size == 1:
        return
    count, found = parallel.local_world_size, current_platform.device_count()
    flags = {
        "tensor_parallel_size": ("--tensor-parallel-size", parallel.tensor_parallel_size),
        "pipeline_parallel_size": ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        "nnodes": ("--nnodes", parallel.nnodes),
    }
    used = {field: f"{flag} {size}" for field, (flag, size) in flags.items() if size > 1}
    if count > found:
        raise VLLMValidationError(
            f"{' with '.join(used.values())} needs {count} GPUs, one per worker, and {found} are "
            f"visible (CUDA_VISIBLE_DEVICES); use at most {found} workers",
            next(iter(used)),
            parallel.world_size,
        )
    if parallel.nnodes == 1:
        check_equal_devices(device_names(config), parallel.tensor_parallel_size)


def device_names(config: VllmConfig) -> list[str]:
    """Of the devices of this host's workers, by local rank."""
    on_cpu, count = (
        config.device_config.device_type == "cpu",
        config.parallel_config.local_world_size,
    )
    return [current_platform.get_device_name(0 if on_cpu else index) for index in range(count)]


def check_equal_devices(names: Sequence[str], tensor_parallel_size: int) -> None:
    """Raises `VLLMValidationError` where workers that share layers have devices of several kinds:
    they would round, and so sample, differently. `names`: of all workers, by rank."""
    for first in range(0, len(names), tensor_parallel_size):
        kinds = names[first : first + tensor_parallel_size]
        if len(set(kinds)) > 1:
            raise VLLMValidationError(
                f"--tensor-parallel-size {tensor_parallel_size}: GPUs that share layers must be of "
                f"one kind, and those visible are {', '.join(kinds)}; choose others with "
                "CUDA_VISIBLE_DEVICES",
                "tensor_parallel_size",
                tensor_parallel_size,
            )
