# SPDX-License-Identifier: Apache-2.0
"""How long a decode step should take: a prediction from what it has to read and multiply.

Every byte of weights and state is taken to cross the memory bus once, at the device's full
bandwidth, and every matmul to run at its full speed; what takes longer of the two counts, of the
weights and of the state apart, and each kernel adds a fixed time. This is a bound that real steps
come near to (docs/state_memory.md, "What a decode step costs"), without sampling, drafts and
communication between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class DeviceSpeed:
    """Peak rates of one device: `bytes_per_s` of its memory, `flops_per_s` of dense 16-bit matmuls,
    and `launch_s`, what a kernel in a captured graph takes beside its work."""

    name: str
    bytes_per_s: float
    flops_per_s: float
    launch_s: float = 1.5e-6


#: from the manufacturers' data sheets
DEVICES = {
    speed.name: speed
    for speed in (
        DeviceSpeed("A100", 2.039e12, 312e12),
        DeviceSpeed("H100", 3.35e12, 989e12),
        DeviceSpeed("H200", 4.8e12, 989e12),
        DeviceSpeed("B200", 8.0e12, 2250e12),
        DeviceSpeed("L40S", 0.864e12, 362e12),
    )
}


#: names that drivers give to what the data sheets are of
_DRIVER_NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA L40S": "L40S",
}


def speed_of_device(driver_name: str) -> DeviceSpeed | None:
    """Of the device that its driver calls so; None for one without figures here."""
    return DEVICES.get(_DRIVER_NAMES.get(driver_name, ""))


@dataclass(frozen=True)
class StateWork:
    """What a decode does with the state of one layer, per sequence: `fixed_bytes` and `fixed_flops`
    whatever its length, and bytes and FLOPs of each token that the layer keeps, the last `window`
    ones (None: all)."""

    fixed_bytes: float = 0.0
    fixed_flops: float = 0.0
    bytes_per_token: float = 0.0
    flops_per_token: float = 0.0
    window: int | None = None

    @classmethod
    def of(
        cls, spec: KVCacheSpec, flops_per_byte: float, commit_interval: int, journal_bytes: int = 0
    ) -> StateWork:
        """Of a layer with this spec, of whose state a byte read takes so many FLOPs.

        Rows of tokens are read; the new token's is written. A recurrent state is read and written
        in every step. With a journal it is written every `commit_interval` steps; in the others a
        token leaves `journal_bytes`, which the steps up to the next commit read.
        """
        size = spec.page_size_bytes
        if not spec.is_recurrent:
            row = size / spec.block_size
            return cls(row, 0.0, row, row * flops_per_byte, spec.window)
        interval = commit_interval if journal_bytes else 1
        moved = size * (1 + 1 / interval)
        moved += journal_bytes * ((interval - 1) / interval + (interval - 1) / 2)
        return cls(moved, size * flops_per_byte)

    def cost(self, context: int) -> tuple[float, float]:
        """Bytes and FLOPs for one sequence of `context` tokens, the new one included."""
        kept = context if self.window is None else min(context, self.window)
        return (
            self.fixed_bytes + self.bytes_per_token * kept,
            self.fixed_flops + self.flops_per_token * kept,
        )


@dataclass(frozen=True)
class ExpertsWork:
    """Of `count` experts of `expert_bytes` a token goes through `chosen`, on average; the tokens of
    so many `replicas` do."""

    count: int
    chosen: float
    expert_bytes: float
    replicas: int = 1

    def bytes(self, tokens: int) -> float:
        """Of the experts that some of `tokens` tokens choose, all being equally likely."""
        missed = (1 - self.chosen / self.count) ** (tokens * self.replicas)
        return self.expert_bytes * self.count * (1 - missed)


@dataclass(frozen=True)
class PartWork:
    """One part of the model: a mixer, what else a decoder layer has, or what is outside of layers.

    `weight_bytes`: read in every step; `flops`: of the matmuls with weights, per token;
    `launches`: kernels; `head_flops`: those of `flops` that only sampled tokens need.
    """

    kind: str
    weight_bytes: int = 0
    flops: int = 0
    launches: int = 0
    states: tuple[StateWork, ...] = ()
    experts: tuple[ExpertsWork, ...] = ()
    head_flops: int = 0


@dataclass(frozen=True)
class PartCost:
    """What all `count` parts of one kind cost in a step: bytes, FLOPs, kernels and `seconds`."""

    kind: str
    count: int
    weight_bytes: float
    state_bytes: float
    flops: float
    launches: int
    seconds: float


@dataclass(frozen=True)
class DecodeCost:
    """A step in which each of `batch` sequences of `context` tokens gets one more."""

    batch: int
    context: int
    parts: tuple[PartCost, ...]
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", sum(part.seconds for part in self.parts))

    @property
    def weight_bytes(self) -> float:
        return sum(part.weight_bytes for part in self.parts)

    @property
    def state_bytes(self) -> float:
        return sum(part.state_bytes for part in self.parts)

    @property
    def bytes_per_token(self) -> float:
        """Read and written per new token."""
        return (self.weight_bytes + self.state_bytes) / self.batch

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts)

    @property
    def launches(self) -> int:
        return sum(part.launches for part in self.parts)


def device_speed(text: str) -> DeviceSpeed:
    """The device of that name, or `BYTES,FLOPS` or `BYTES,FLOPS,US`: bytes and FLOPs per second,
    microseconds per kernel. ValueError for anything else."""
    if text in DEVICES:
        return DEVICES[text]
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if len(rates) not in (2, 3) or not all(math.isfinite(rate) and rate > 0 for rate in rates):
        known = ", ".join(DEVICES)
        raise ValueError(
            f"device {text!r}: expected one of {known}, or its bytes and FLOPs per second "
            "(and microseconds per kernel), as 3.35e12,989e12,1.5"
        )
    launch_s = rates[2] * 1e-6 if len(rates) == 3 else DeviceSpeed.launch_s
    return DeviceSpeed("given device", rates[0], rates[1], launch_s)


def predict(work: Sequence[PartWork], device: DeviceSpeed, batch: int, context: int) -> DecodeCost:
    """The cost of a step of a model that consists of `work`; kinds in the order of their first
    part. ValueError for a batch or a context below 1."""
    if batch < 1 or context < 1:
        raise ValueError(f"a step needs sequences and tokens, got {batch} of {context}")
    kinds: dict[str, list[PartWork]] = {}
    for part in work:
        kinds.setdefault(part.kind, []).append(part)
    costs = (_of_kind(kind, parts, device, batch, context) for kind, parts in kinds.items())
    return DecodeCost(batch, context, tuple(costs))


def _of_kind(
    kind: str, parts: list[PartWork], device: DeviceSpeed, batch: int, context: int
) -> PartCost:
    weights = sum(
        part.weight_bytes + sum(one.bytes(batch) for one in part.experts) for part in parts
    )
    states = [state.cost(context) for part in parts for state in part.states]
    state_bytes, state_flops = (batch * sum(one[i] for one in states) for i in (0, 1))
    products = batch * sum(part.flops for part in parts)
    launches = sum(part.launches for part in parts)
    seconds = launches * device.launch_s
    for size, flops in ((weights, products), (state_bytes, state_flops)):
        seconds += max(size / device.bytes_per_s, flops / device.flops_per_s)
    flops = products + state_flops
    return PartCost(kind, len(parts), weights, state_bytes, flops, launches, seconds)
