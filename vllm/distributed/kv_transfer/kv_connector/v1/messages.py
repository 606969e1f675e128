# SPDX-License-Identifier: Apache-2.0
"""What the two sides of a connector send each other; `base` offers these names to connectors.

They are apart from the interface because a scheduler's step, which the interface takes, holds one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class KVConnectorMetadata(ABC):  # noqa: B024
    """A step's message from the scheduler side to the worker side; must survive pickling."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024
    """What a worker tells its peers at start-up; must survive pickling."""


class KVConnectorWorkerMetadata(ABC):
    """A step's message from the worker side to the scheduler side."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another rank's message into this one and return it."""
