# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs. Static facts come from NVML, so that the front end never initialises CUDA."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm import decisions
from vllm.exceptions import VLLMValidationError
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.kernels.interface import Kernels

_QUERY = "uuid,name,memory.total,compute_cap"


@dataclass(frozen=True)
class GpuFacts:
    """What `nvidia-smi` says about one GPU."""

    uuid: str
    name: str
    total_bytes: int
    capability: tuple[int, int]


def count_devices() -> int:
    """Visible CUDA devices; torch asks NVML first, which leaves CUDA uninitialised."""
    return torch.cuda.device_count() if torch.version.cuda is not None else 0


def parse_gpu_facts(listing: str) -> tuple[GpuFacts, ...]:
    """Rows of `nvidia-smi --query-gpu=uuid,name,memory.total,compute_cap` in CSV."""
    facts = []
    for line in listing.strip().splitlines():
        uuid, name, mebibytes, capability = (cell.strip() for cell in line.split(","))
        major, minor = capability.split(".")
        facts.append(GpuFacts(uuid, name, int(mebibytes) * 2**20, (int(major), int(minor))))
    return tuple(facts)


def select_visible(gpus: tuple[GpuFacts, ...], visible: str | None) -> tuple[GpuFacts, ...]:
    """The GPUs in the order of `CUDA_VISIBLE_DEVICES` (numbers or UUID prefixes).

    As in the CUDA runtime, the list ends at the first entry that names no GPU.
    """
    if visible is None:
        return gpus
    chosen: list[GpuFacts] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            matches = gpus[int(entry) : int(entry) + 1]
        else:
            matches = tuple(gpu for gpu in gpus if entry and gpu.uuid.startswith(entry))
        if len(matches) != 1:
            break
        chosen.append(matches[0])
    return tuple(chosen)


@lru_cache(maxsize=1)
def _smi_facts() -> tuple[GpuFacts, ...]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return parse_gpu_facts(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def gpu_facts(device_id: int = 0) -> GpuFacts:
    """Facts of a visible GPU; CUDA itself is asked only where `nvidia-smi` cannot answer."""
    gpus = select_visible(_smi_facts(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if device_id < len(gpus):
        return gpus[device_id]
    properties = torch.cuda.get_device_properties(device_id)
    capability = (properties.major, properties.minor)
    return GpuFacts(str(device_id), properties.name, properties.total_memory, capability)


def visible_part(visible: str | None, first: int, count: int) -> dict[str, str]:
    """`CUDA_VISIBLE_DEVICES` for the GPUs `[first, first + count)` of those in `visible`, its value
    here. Raises `VLLMValidationError` where there are not so many."""
    found = count_devices()
    if first + count > found:
        raise VLLMValidationError(
            f"{first + count} GPUs are needed for the workers of all replicas, and {found} are "
            "visible; lower --data-parallel-size or --tensor-parallel-size",
            "data_parallel_size",
        )
    numbers = map(str, range(found))
    names = list(numbers) if visible is None else [name.strip() for name in visible.split(",")]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + count])}


class CudaPlatform(Platform):
    """Runs the Triton kernels."""

    enum = PlatformEnum.CUDA
    device_type = "cuda"
    dispatch_key = "CUDA"
    dist_backend = "nccl"
    supports_graphs = True
    converts_conv_state = True
    defers_commit = True
    splits_scans = True
    supports_pinned_memory = True
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    interface_env_var = "NCCL_SOCKET_IFNAME"
    #: else it would be the beginning of a name
    interface_spelling = "={}"

    @property
    def supported_dtypes(self) -> tuple[torch.dtype, ...]:
        if self.get_device_capability() >= (8, 0):
            return (torch.bfloat16, torch.float16, torch.float32)
        return (torch.float16, torch.float32)

    @property
    def supports_fp8(self) -> bool:
        return self.get_device_capability() >= (8, 9)

    @property
    def supports_fp8_cache(self) -> bool:
        return self.supports_fp8

    @cached_property
    def kernels(self) -> Kernels:
        from vllm.kernels.cuda import CudaKernels

        return CudaKernels(self.get_device_capability())

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*gpu_facts(device_id).capability)

    def get_device_uuid(self, device_id: int = 0) -> str:
        return gpu_facts(device_id).uuid

    def get_device_name(self, device_id: int = 0) -> str:
        return gpu_facts(device_id).name

    def device_count(self) -> int:
        return count_devices()

    def total_memory_bytes(self, device_id: int = 0) -> int:
        return gpu_facts(device_id).total_bytes

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def set_device(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def prepare_device(self) -> None:
        use_on_a_thread(torch.device(self.device_type, 0))

    def environment_of_devices(self, first: int, count: int) -> dict[str, str]:
        return visible_part(os.environ.get(self.device_control_env_var), first, count)

    def prepare_collectives(self) -> None:
        prepare_nccl(os.environ)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def free_memory_bytes(self, device: torch.device) -> int | None:
        return torch.cuda.mem_get_info(device)[0]


#: rows, columns: any will do
_SHAPE = (64, 64)


def use_on_a_thread(device: torch.device) -> threading.Thread:
    """Begin to use `device` with what every model uses.

    torch loads a kernel's code when it first launches it, and cuBLAS what it needs of itself, for
    tens of milliseconds each and outside of Python: here beside the process's imports.
    """
    thread = threading.Thread(target=_use, args=(device,), name="first-use", daemon=True)
    thread.start()
    return thread


@torch.inference_mode()
def _use(device: torch.device) -> None:
    torch.cuda.set_device(device)
    weight = torch.zeros(_SHAPE, dtype=torch.bfloat16, device=device)
    places = torch.arange(_SHAPE[0], device=device)
    nn.functional.linear(nn.functional.embedding(places, weight), weight)
    torch.cuda.synchronize(device)


#: makes a collective wait on the host: steps would, and no graph could be captured
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_MULTICAST = "NCCL_NVLS_ENABLE"


def prepare_nccl(environment: MutableMapping[str, str]) -> None:
    """Set what the user has not, before the first communicator.

    Raises `VLLMValidationError` for a variable that makes collectives wait on the host.
    """
    for name in _BLOCKING:
        if environment.get(name, "0").strip().lower() not in ("", "0", "false", "n", "no"):
            raise VLLMValidationError(
                f"{name}={environment[name]} makes the host wait in every collective, so steps "
                "over several GPUs can be neither asynchronous nor graphs; unset it",
                name,
            )
    if _MULTICAST not in environment:
        environment[_MULTICAST] = "0"
        decisions.record(
            "NVLink multicast",
            "off",
            "a program that ends badly while it uses multicast can leave the GPUs of the host "
            f"unusable; {_MULTICAST}=1 turns it on",
        )
