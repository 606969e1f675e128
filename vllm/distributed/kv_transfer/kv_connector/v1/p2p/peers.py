# SPDX-License-Identifier: Apache-2.0
"""The producers that a consumer's worker knows: greeted once each, forgotten when lost and idle."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.identity import (
    HandshakeRefused,
    Identity,
    compare,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.messages import RemoteState
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import StillWriting, Transport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.wire import (
    Address,
    Deadline,
    PeerLost,
    PeerRefused,
    ask,
)

#: longest answer to a greeting
_MAX_HELLO_BYTES = 4 * 2**20

_Key = tuple[str, Address]


@dataclass(eq=False)
class Peer:
    """A producer that keeps the same kind of state: its `name` at the transport, and its leases.

    `is_lost`: it did not answer a request, so that whoever comes next greets it anew.
    """

    label: str
    name: str = ""
    lease_s: float = 0.0
    is_lost: bool = False
    num_users: int = 0
    greeting: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """`PeerLost` if it was lost meanwhile."""
        if self.is_lost:
            raise PeerLost(f"{self.label} was lost while the request waited")


class Peers:
    """`rank` of `num_ranks` talks to workers of the same rank. `identity` may be replaced."""

    def __init__(self, transport: Transport, identity: Identity, rank: int, num_ranks: int) -> None:
        self.identity = identity
        self._transport, self._rank, self._num_ranks = transport, rank, num_ranks
        self._lock = threading.Lock()
        self._known: dict[_Key, Peer] = {}
        #: name at the transport -> peers that have it: one that was lost and is greeted anew may
        #: still be read from
        self._connected: Counter[str] = Counter()

    def address(self, remote: RemoteState) -> Address:
        return remote.host, remote.ports[self._rank]

    @contextmanager
    def using(self, remote: RemoteState, deadline: Deadline) -> Iterator[Peer]:
        """The producer, after both were found to keep the same kind of state. While anybody uses it
        the transport knows it. It is lost when the block raises `PeerLost` or `StillWriting`."""
        if len(remote.ports) != self._num_ranks:
            raise HandshakeRefused(
                f"{remote.host} keeps state on other ranks: tensor_parallel_size is "
                f"{self._num_ranks} here and {len(remote.ports)} there; both sides need the same"
            )
        key = remote.engine_id, self.address(remote)
        with self._lock:
            peer = self._known.setdefault(key, Peer("{}:{}".format(*key[1])))
            peer.num_users += 1
        try:
            self._greet(peer, key, deadline)
            try:
                yield peer
            except (PeerLost, StillWriting):
                peer.is_lost = True
                raise
        finally:
            self._leave(peer, key)

    def _greet(self, peer: Peer, key: _Key, deadline: Deadline) -> None:
        """Others of the same peer wait meanwhile, and greet it themselves if this fails."""
        if not peer.greeting.acquire(timeout=deadline.left(peer.label)):
            raise PeerLost(f"{peer.label}: no answer to a greeting in time")
        try:
            if peer.name:
                return
            engine_id, address = key
            reply = ask(address, {"op": "hello"}, deadline, _MAX_HELLO_BYTES)
            if reply["engine_id"] != engine_id:
                raise PeerRefused(
                    f"{peer.label} is engine {reply['engine_id']} now, not {engine_id}"
                )
            compare(self.identity, reply["identity"], peer.label)
            peer.lease_s = float(reply["lease_s"])
            with self._lock:
                name = self._transport.connect(address, reply["transport"])
                self._connected[name] += 1
            peer.name = name
        finally:
            peer.greeting.release()

    def _leave(self, peer: Peer, key: _Key) -> None:
        """Whoever comes after a loss greets the peer anew; the transport forgets it when nobody
        reads from it any more."""
        with self._lock:
            peer.num_users -= 1
            gone = peer.is_lost or not (peer.name or peer.num_users)
            if gone and self._known.get(key) is peer:
                del self._known[key]
            if gone and peer.name and not peer.num_users:
                self._connected[peer.name] -= 1
                if not self._connected[peer.name]:
                    del self._connected[peer.name]
                    self._transport.disconnect(peer.name)
