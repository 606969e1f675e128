# SPDX-License-Identifier: Apache-2.0
"""What carries the bytes. A transport knows registered memory and peers, and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import Address, Deadline, Handler


class Range(NamedTuple):
    """`size` bytes at `remote` of the peer's memory, wanted at `local` of one's own."""

    remote: int
    local: int
    size: int


class StillWriting(ConnectionError):
    """A read failed and may go on writing: the memory it was to fill must not be used again."""


class CannotRegister(RuntimeError):
    """Memory of this kind cannot be read by peers, or written by reads."""


class Transport(ABC):
    """One per worker, called from several threads at once."""

    @abstractmethod
    def register(self, readable: Tensor | None, target: Tensor | None) -> None:
        """`uint8 [bytes]` each, both in host memory or both on one device: what peers may read, and
        where reads arrive. Called once, before anything else. `CannotRegister` for memory of a
        device that it cannot reach."""

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
