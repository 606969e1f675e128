# SPDX-License-Identifier: Apache-2.0
"""What carries the bytes. A transport knows registered host memory and peers, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import Address, Deadline, Handler


class Range(NamedTuple):
    """`size` bytes at `remote` of the peer's memory, wanted at `local` of one's own."""

    remote: int
    local: int
    size: int


class StillWriting(ConnectionError):
    """A read failed and may go on writing: the memory it was to fill must not be used again."""


class Transport(ABC):
    """One per worker, called from several threads at once."""

    @abstractmethod
    def register(self, readable: np.ndarray | None, target: np.ndarray | None) -> None:
        """`uint8 [bytes]` each: what peers may read, and where reads arrive. Called once, before
        anything else."""

    @abstractmethod
    def describe(self) -> bytes:
        """What a peer's `connect` needs to read from here."""

    def handlers(self) -> Mapping[str, Handler]:
        """Messages that this transport answers at the worker's port."""
        return {}

    @abstractmethod
    def connect(self, address: Address, description: bytes) -> str:
        """Name of the peer that answers at `address` and gave this description."""

    @abstractmethod
    def read(self, peer: str, ranges: Sequence[Range], deadline: Deadline) -> None:
        """Returns when all bytes have arrived. `PeerLost` if they will not, or not in time, and
        nothing writes any more; else `StillWriting`."""

    def disconnect(self, peer: str) -> None:  # noqa: B027
        """Forget a peer."""

    def close(self) -> None:  # noqa: B027
        """Release everything."""
