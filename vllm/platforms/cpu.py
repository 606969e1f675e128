# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device. Memory figures respect a container's limit."""

from __future__ import annotations

import platform
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from vllm.platforms.interface import Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.kernels.interface import Kernels

#: limit of the memory cgroup, v2 and v1
_CGROUP_FILES = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def cgroup_memory() -> int | None:
    """Bytes that this container may use, or None when it has no limit.

    Cgroup v2 writes the word `max` and v1 a number near 2**63 for "no limit".
    """
    for path in _CGROUP_FILES:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        if limit < 2**60:
            return limit
    return None


class CpuPlatform(Platform):
    """Runs the C++ kernels in `csrc/cpu`."""

    enum = PlatformEnum.CPU
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    supports_graphs = False
    converts_conv_state = False
    defers_commit = False
    splits_scans = False
    supports_pinned_memory = False
    device_control_env_var = "CPU_VISIBLE_MEMORY_NODES"
    interface_env_var = "GLOO_SOCKET_IFNAME"

    @property
    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float16, torch.float32)

    @property
    def supports_fp8(self) -> bool:
        return True

    @property
    def supports_fp8_cache(self) -> bool:
        return False

    @cached_property
    def kernels(self) -> Kernels:
        from vllm.kernels.cpu import CpuKernels

        return CpuKernels()

    def get_device_name(self, device_id: int = 0) -> str:
        return platform.processor() or platform.machine() or "cpu"

    def total_memory_bytes(self, device_id: int = 0) -> int:
        total, limit = psutil.virtual_memory().total, cgroup_memory()
        return total if limit is None else min(total, limit)

    def synchronize(self) -> None:
        """CPU ops are done when they return."""

    def set_device(self, device: torch.device) -> None:
        """There is one CPU device."""

    def prepare_device(self) -> None:
        """Nothing to do."""

    def prepare_collectives(self) -> None:
        """Nothing to do."""

    def empty_cache(self) -> None:
        """The CPU allocator keeps no cache."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor

    def free_memory_bytes(self, device: torch.device) -> int | None:
        return None
