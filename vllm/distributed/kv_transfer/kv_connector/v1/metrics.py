# SPDX-License-Identifier: Apache-2.0
"""Numbers a connector reports about itself, merged over steps and ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


@dataclass
class KVConnectorStats(ABC):
    """One interval's numbers; `data` must survive pickling and msgpack."""

    data: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def reset(self) -> None:
        """Start a new interval."""

    @abstractmethod
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Merge another interval or rank into this one and return it."""

    @abstractmethod
    def reduce(self) -> dict[str, int | float]:
        """The figures to log."""

    @abstractmethod
    def is_empty(self) -> bool: ...
