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

#: (limit, usage) of the memory cgroup, v2 and v1
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def cgroup_memory() -> tuple[int, int] | None:
    """`(limit_bytes, used_bytes)` of this container, or None when it has no limit.

    Cgroup v2 writes the word `max` and v1 a number near 2**63 for "no limit".
    """
    for limit_path, usage_path in _CGROUP_FILES:
        limit, used = _read_int(limit_path), _read_int(usage_path)
        if limit is not None and used is not None and limit < 2**60:
            return limit, used
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
        total = psutil.virtual_memory().total
        group = cgroup_memory()
        return total if group is None else min(total, group[0])

    def available_memory_bytes(self, device_id: int = 0) -> int:
        available = psutil.virtual_memory().available
        group = cgroup_memory()
        return available if group is None else min(available, max(group[0] - group[1], 0))

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
