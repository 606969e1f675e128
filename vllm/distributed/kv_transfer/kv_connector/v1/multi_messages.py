# SPDX-License-Identifier: Apache-2.0
"""`MultiConnector`'s messages: one part per child, in the children's order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from typing_extensions import Self

from vllm.distributed.kv_transfer.kv_connector.utils import joined
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

Ranks = TypeVar("Ranks")


@dataclass
class MultiKVConnectorMetadata(KVConnectorMetadata):
    """`extra_async_saves`: finished request -> children that hold its blocks, beyond the first."""

    metadata: tuple[KVConnectorMetadata, ...]
    extra_async_saves: dict[str, int] = field(default_factory=dict)


@dataclass
class _Parts:
    """A part per child; None where it has none."""

    parts: tuple[Any | None, ...]

    @classmethod
    def of(cls, parts: Iterable[Any | None]) -> Self | None:
        """None when no child has a part."""
        found = tuple(parts)
        return cls(found) if any(part is not None for part in found) else None

    def aggregate(self, other: Any) -> Self:
        pairs = zip(self.parts, other.parts, strict=True)
        return type(self)(tuple(joined(mine, theirs) for mine, theirs in pairs))


class MultiKVConnectorHandshakeMetadata(_Parts, KVConnectorHandshakeMetadata):
    """What a worker's children tell theirs."""


class MultiKVConnectorWorkerMetadata(_Parts, KVConnectorWorkerMetadata):
    """What a worker's children report."""


class MultiKVEvents(_Parts):
    """Cache events."""


@dataclass
class MultiKVConnectorStats(KVConnectorStats):
    """`data`: child -> its `KVConnectorStats`."""

    def reset(self) -> None:
        for stats in self.data.values():
            stats.reset()

    def aggregate(self, other: KVConnectorStats) -> MultiKVConnectorStats:
        for child, stats in other.data.items():
            mine = self.data.get(child)
            self.data[child] = stats if mine is None else mine.aggregate(stats)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            f"{child} {name}": value
            for child, stats in self.data.items()
            for name, value in stats.reduce().items()
        }

    def is_empty(self) -> bool:
        return all(stats.is_empty() for stats in self.data.values())


def child_key(index: int, connector_cls: type) -> str:
    """Names a child in statistics: two may be of one class, so its place is part of the key."""
    return f"{index}:{connector_cls.__name__}"


class MultiKVConnectorPromMetrics(KVConnectorPromMetrics):
    """The children's metrics by child key; none of its own."""

    def __init__(self, children: dict[str, KVConnectorPromMetrics]) -> None:
        self._children = children

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, child in self._children.items():
            part = transfer_stats_data.get(key)
            if part is not None:
                child.observe(part_data(part), engine_idx)


def part_data(part: KVConnectorStats | dict[str, Any]) -> dict[str, Any]:
    """A child's `data`: between processes its statistics become a dict of their fields."""
    data: dict[str, Any] = part.data if isinstance(part, KVConnectorStats) else part["data"]
    return data


def handshake_parts(
    metadata: dict[Ranks, KVConnectorHandshakeMetadata], index: int
) -> dict[Ranks, KVConnectorHandshakeMetadata]:
    """What a child's workers said, by rank."""
    found = {}
    for ranks, message in metadata.items():
        assert isinstance(message, MultiKVConnectorHandshakeMetadata)
        if (part := message.parts[index]) is not None:
            found[ranks] = part
    return found
