# SPDX-License-Identifier: Apache-2.0
"""What a platform says about its device and offers to the layers."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import torch

    from vllm.kernels.interface import Kernels


class PlatformEnum(enum.Enum):
    """The device kinds."""

    CPU = "cpu"
    CUDA = "cuda"


class Platform(ABC):
    """One device kind; capabilities are class data, so that nobody dispatches on names."""

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

    def is_cuda(self) -> bool:
        return self.enum is PlatformEnum.CUDA

    def is_cpu(self) -> bool:
        return self.enum is PlatformEnum.CPU

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

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

    @abstractmethod
    def total_memory_bytes(self, device_id: int = 0) -> int:
        """Memory of the device; does not initialise it."""

    @abstractmethod
    def available_memory_bytes(self, device_id: int = 0) -> int:
        """Memory that is free now; initialises a CUDA device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle. Never called in the step loop."""

    @abstractmethod
    def set_device(self, device: torch.device) -> None: ...

    @abstractmethod
    def prepare_device(self) -> None:
        """Begin what the first use of the first device takes, beside other work."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Return unused memory of the allocator to the device."""
