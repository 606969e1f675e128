# SPDX-License-Identifier: Apache-2.0
"""Where the digests of loaded blocks are made: in the arena, which sees what has arrived, or in
the host memory that they come from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from vllm import decisions
from vllm.distributed.kv_transfer.kv_connector.v1.device_seal import DeviceSealer, device_seal_bytes
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.host_memory import HostMemory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import MovedBlock
from vllm.distributed.kv_transfer.kv_connector.v1.seal import SHORT, Span, digests, num_threads
from vllm.kernels.cuda_library import CudaOps
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import ArenaPlan

#: about the most that is copied before its digests begin
_PART_BYTES = 2**25
_DEVICE_PART_BYTES = 2**26
#: blocks that memory on the device is planned for; digests of larger ones are the host's
_MAX_BLOCK_BYTES = 2**28
#: of which the device makes digests at a time
_MAX_BLOCKS = 2**16

_WHAT = "digests of loaded state"
_ON_HOST = "on the host"
_OPS = CudaOps(
    _WHAT, "the device reads state faster than the host", instead_of=_ON_HOST, hopper_only=False
)


#: launches the copies of a part, by its index; the event after them, None where they are made
Bring = Callable[[int], torch.cuda.Event | None]
#: told of the digests made: bytes, seconds of a thread or of the device
Count = Callable[[int, float], None]


class ArrivalCheck(ABC):
    """How a load's blocks are checked: in at least `num_parts` parts of up to `part_bytes` bytes,
    or one block."""

    def __init__(self, part_bytes: int, num_parts: int) -> None:
        self.part_bytes, self.num_parts = part_bytes, num_parts

    def tasks(self, parts: list[list[int]]) -> list[list[list[int]]]:
        """The parts that one thread brings and checks, for each thread."""
        return [[part] for part in parts]

    @abstractmethod
    def digests(self, parts: Sequence[Sequence[MovedBlock]], bring: Bring) -> list[int]:
        """Of the blocks of all parts of a task, which have arrived then."""


class _HostCheck(ArrivalCheck):
    """The host makes digests of its memory while copies run, or of an arena that it shares."""

    def __init__(self, data: Tensor, span: Callable[[MovedBlock], Span], count: Count) -> None:
        super().__init__(_PART_BYTES, num_threads())
        self._data, self._span, self._count = data, span, count

    def digests(self, parts: Sequence[Sequence[MovedBlock]], bring: Bring) -> list[int]:
        found: list[int] = []
        for i, part in enumerate(parts):
            arrived = bring(i)
            spans = [self._span(block) for block in part]
            began = time.perf_counter()
            found += digests(self._data, spans)
            self._count(sum(size for _, size in spans), time.perf_counter() - began)
            if arrived is not None:
                arrived.synchronize()
        return found


class _DeviceCheck(ArrivalCheck):
    """The device makes digests of what has arrived; one thread launches all."""

    def __init__(self, arena: Tensor, plan: ArenaPlan, count: Count) -> None:
        sizes = [group.block_bytes for group in plan.groups]
        part_bytes = max(_DEVICE_PART_BYTES, *sizes)
        super().__init__(part_bytes, 1)
        self._sealer = DeviceSealer(arena.device, part_bytes, min(sizes), _MAX_BLOCKS)
        self._arena, self._plan, self._count = arena, plan, count

    def tasks(self, parts: list[list[int]]) -> list[list[list[int]]]:
        return _grouped(parts, _MAX_BLOCKS)

    def digests(self, parts: Sequence[Sequence[MovedBlock]], bring: Bring) -> list[int]:
        spans = [[_in_arena(self._plan, block) for block in part] for part in parts]
        num_bytes = sum(size for part in spans for _, size in part)
        return self._sealer.digests_in_parts(
            self._arena, spans, bring, partial(self._count, num_bytes)
        )


def _grouped(parts: list[list[int]], most: int) -> list[list[list[int]]]:
    """Parts in their order, in groups of at most `most` blocks; a larger part is cut."""
    groups: list[list[list[int]]] = []
    room = 0
    for part in parts:
        for begin in range(0, len(part), most):
            some = part[begin : begin + most]
            if len(some) > room:
                groups.append([])
                room = most
            groups[-1].append(some)
            room -= len(some)
    return groups


def _in_arena(plan: ArenaPlan, block: MovedBlock) -> Span:
    group = block.group
    return block.device_block * plan.block_stride(group), plan.groups[group].block_bytes


def arrival_device_bytes(device_type: str) -> int:
    """Device memory that checks take up at most: how large blocks are is not known yet."""
    if device_type != "cuda":
        return 0
    return device_seal_bytes(_MAX_BLOCK_BYTES, _MAX_BLOCK_BYTES // _MAX_BLOCKS)


def make_check(arena: Tensor, plan: ArenaPlan, host: HostMemory, count: Count) -> ArrivalCheck:
    """Of the arena where its device makes digests."""
    if not arena.is_cuda:
        return _HostCheck(arena, partial(_in_arena, plan), count)
    if _device_makes_digests([group.block_bytes for group in plan.groups]):
        return _DeviceCheck(arena, plan, count)
    return _HostCheck(host.buffer, lambda b: host.extent(b.group, b.host_block), count)


def _device_makes_digests(sizes: Sequence[int]) -> bool:
    """Whether the digests of blocks of so many bytes are made on a GPU."""
    why = None
    if min(sizes) <= SHORT:
        why = f"the smallest block has {min(sizes)} bytes, the device needs more than {SHORT}"
    elif max(sizes) > _MAX_BLOCK_BYTES:
        why = f"the largest block has {max(sizes)} bytes, the device takes {_MAX_BLOCK_BYTES}"
    if why is not None:
        decisions.record(_WHAT, _ON_HOST, why, instead_of="vllm_cuda")
        return False
    capability = current_platform.get_device_capability()
    return capability is not None and _OPS.choose(capability)
