# SPDX-License-Identifier: Apache-2.0
"""What a platform says about its device and offers to the layers."""

from __future__ import annotations

import enum
import os
import random
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from vllm import decisions

if TYPE_CHECKING:
    import torch

    from vllm.kernels.interface import Kernels


class PlatformEnum(enum.Enum):
    """The device kinds."""

    CPU = "cpu"
    CUDA = "cuda"


class DeviceCapability(NamedTuple):
    """CUDA's compute capability, e.g. `(9, 0)`."""

    major: int
    minor: int

    def as_version_str(self) -> str:
        """`9.0`."""
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        """`90`."""
        return self.major * 10 + self.minor


class Platform(ABC):
    """One device kind; capabilities are class data, so that nobody dispatches on names.

    Third parties ask it, too: the questions about other kinds of devices (`is_rocm`, `is_tpu`
    ...) have an answer here, and theirs about a device take `device_id`.
    """

    enum: ClassVar[PlatformEnum]
    #: torch's name of the device kind
    device_type: ClassVar[Literal["cpu", "cuda"]]
    #: key under which torch.distributed and autocast know the device
    dispatch_key: ClassVar[str]
    dist_backend: ClassVar[str]
    #: whether a batch shape can be captured once and replayed
    supports_graphs: ClassVar[bool]
    #: whether a convolution's state may have another dtype than its inputs
    converts_conv_state: ClassVar[bool]
    #: whether decode kernels can leave updates of recurrent state in a ring
    defers_commit: ClassVar[bool]
    #: whether prefill kernels can scan the segments of a sequence at the same time
    splits_scans: ClassVar[bool]
    #: whether copies to pinned host memory can overlap with compute
    supports_pinned_memory: ClassVar[bool]

    #: environment variable that chooses the visible devices
    device_control_env_var: ClassVar[str]
    #: environment variable by which the library of collectives is told its network interface, and
    #: how it spells one
    interface_env_var: ClassVar[str]
    interface_spelling: ClassVar[str] = "{}"

    def is_cuda(self) -> bool:
        return self.enum is PlatformEnum.CUDA

    def is_cpu(self) -> bool:
        return self.enum is PlatformEnum.CPU

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_rocm(self) -> bool:
        return False

    is_tpu = is_xpu = is_rocm

    def is_out_of_tree(self) -> bool:
        """Whether a plug-in brought the platform: they cannot."""
        return False

    def is_unspecified(self) -> bool:
        """Whether no device was found: the CPU is always there."""
        return False

    @property
    def device_name(self) -> str:
        """The device kind's name, `device_type`."""
        return self.device_type

    def is_pin_memory_available(self) -> bool:
        return self.supports_pinned_memory

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """The compute capability, None for devices without one."""
        return None

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the device has at least `capability`: `(9, 0)` or 90."""
        current = self.get_device_capability(device_id)
        return current is not None and current >= _as_pair(capability)

    def is_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the device has exactly `capability`: `(9, 0)` or 90."""
        return self.get_device_capability(device_id) == _as_pair(capability)

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes; upstream's name of `total_memory_bytes`."""
        return self.total_memory_bytes(device_id)

    def seed_everything(self, seed: int | None = None) -> None:
        """Seed Python's, numpy's and torch's generators; None leaves them."""
        # Later than this module, which is imported before torch to prepare the device meanwhile.
        import numpy as np
        import torch

        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)

    @property
    @abstractmethod
    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        """Model dtypes, preferred first."""

    @property
    @abstractmethod
    def supports_fp8(self) -> bool:
        """Whether the kernels multiply float8."""

    @property
    @abstractmethod
    def supports_fp8_cache(self) -> bool:
        """Whether the kernels keep keys and values in float8."""

    @cached_property
    @abstractmethod
    def kernels(self) -> Kernels:
        """The layer kernels of this platform, built on first use."""

    @abstractmethod
    def get_device_name(self, device_id: int = 0) -> str: ...

    def device_count(self) -> int:
        """Devices that workers of this host may use; does not initialise any."""
        return 1

    @abstractmethod
    def total_memory_bytes(self, device_id: int = 0) -> int:
        """Memory of the device; does not initialise it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle. Never called in the step loop."""

    @abstractmethod
    def set_device(self, device: torch.device) -> None: ...

    @abstractmethod
    def prepare_device(self) -> None:
        """Begin what the first use of the first device takes, beside other work."""

    def environment_of_devices(self, first: int, count: int) -> dict[str, str]:
        """Variables of a process, not started yet, that is to see `count` of this one's devices
        from `first` on. Raises `VLLMValidationError` where there are not so many."""
        return {}

    @abstractmethod
    def prepare_collectives(self) -> None:
        """Settings of the library that runs the device's collectives, before its first use. Raises
        `VLLMValidationError` for the user's that steps cannot work with."""

    def communicate_over(self, interface: str) -> None:
        """Let collectives use this network interface, unless the user has chosen one; before their
        first use."""
        variable = self.interface_env_var
        chosen = self.interface_spelling.format(interface)
        why = f"it leads to the other hosts; {variable} chooses another"
        if variable in os.environ:
            chosen, why = os.environ[variable], variable
        os.environ[variable] = chosen
        decisions.record("network interface of collectives", chosen, why)

    @abstractmethod
    def empty_cache(self) -> None:
        """Return unused memory of the allocator to the device."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, page-locked so that it comes back at the link's speed; the tensor
        itself where it is there already."""

    @abstractmethod
    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on the device of what `to_host` gave; the tensor itself where that is the same.
        Work that is launched later waits for it."""

    @abstractmethod
    def free_memory_bytes(self, device: torch.device) -> int | None:
        """What no process has taken of the device; None for one that has no memory but the
        host's."""


def _as_pair(capability: tuple[int, int] | int) -> tuple[int, int]:
    return divmod(capability, 10) if isinstance(capability, int) else capability
