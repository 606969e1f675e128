# SPDX-License-Identifier: Apache-2.0
"""What the two sides of a connector tell each other, and producers their consumers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import CounterPromMetrics, CounterStats

#: longest time that a peer may let its question wait for an answer
MAX_WAIT_S = 3600.0


class Place(NamedTuple):
    """A block of a request: the `nth` of its group, and where it is on this device."""

    nth: int
    block: int


#: by group, in token order; what slid out of a window is left out
Places = list[list[Place]]


@dataclass(frozen=True)
class SendJob:
    """State after `num_tokens` tokens with this digest, of a request that has ended."""

    req_id: str
    num_tokens: int
    tokens_digest: int
    places: Places


@dataclass(frozen=True)
class RemoteState:
    """Where a producer keeps a request's state: `kv_transfer_params` of its reply, read."""

    engine_id: str
    req_id: str
    host: str
    ports: tuple[int, ...]
    num_tokens: int

    @classmethod
    def of(cls, params: dict[str, Any]) -> RemoteState:
        """ValueError naming a parameter that is missing or of no use."""
        ports = _given(params, "remote_ports", list)
        if not ports or not all(type(port) is int and 0 < port < 2**16 for port in ports):
            raise ValueError(f"kv_transfer_params.remote_ports: a list of ports, not {ports!r}")
        num_tokens = _given(params, "remote_num_tokens", int)
        if num_tokens < 1:
            raise ValueError(f"kv_transfer_params.remote_num_tokens is {num_tokens}, below 1")
        return cls(
            _given(params, "remote_engine_id", str),
            _given(params, "remote_request_id", str),
            _given(params, "remote_host", str),
            tuple(ports),
            num_tokens,
        )

    def params(self) -> dict[str, Any]:
        """For the reply; a client hands them to the engine that goes on."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.req_id,
            "remote_host": self.host,
            "remote_ports": list(self.ports),
            "remote_num_tokens": self.num_tokens,
            "tp_size": len(self.ports),
        }


def _given(params: dict[str, Any], key: str, kind: type) -> Any:
    value = params.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(
            f"kv_transfer_params.{key}: {value!r}, where a {kind.__name__} is needed; hand on what "
            "the producer's reply has, as it is"
        )
    return value


@dataclass(frozen=True)
class ReceiveJob:
    """Blocks that a waiting request needs, of tokens with this digest."""

    req_id: str
    remote: RemoteState
    tokens_digest: int
    places: Places


@dataclass
class P2pMetadata(KVConnectorMetadata):
    """A step's transfers. `expects`: state that this engine will ask for, so it must be kept.
    `releases`: state that it will not ask for. `weights`: those of the engine from here on, when
    what it keeps is to be dropped; `withdrawn`: ended requests whose state is not handed on."""

    sends: list[SendJob] = field(default_factory=list)
    receives: list[ReceiveJob] = field(default_factory=list)
    expects: list[RemoteState] = field(default_factory=list)
    releases: list[RemoteState] = field(default_factory=list)
    weights: list[Any] | None = None
    withdrawn: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self == P2pMetadata()


@dataclass(frozen=True)
class P2pHandshake(KVConnectorHandshakeMetadata):
    """Where a rank answers its peers, and how much of a request's state fits its staging memory."""

    port: int
    staging_bytes: int


#: key of the statistics -> metric without `vllm:`, its help
COUNTERS = {
    "sent_requests": ("kv_p2p_sent_requests", "Requests whose state was made ready for a peer."),
    "sent_bytes": ("kv_p2p_sent_bytes", "Bytes made ready for peers."),
    "failed_sends": ("kv_p2p_failed_sends", "Requests whose state could not be made ready."),
    "expired_leases": ("kv_p2p_expired_leases", "Requests whose state nobody fetched in time."),
    "received_requests": ("kv_p2p_received_requests", "Requests whose state was fetched."),
    "received_bytes": ("kv_p2p_received_bytes", "Bytes fetched from peers."),
    "receive_seconds": ("kv_p2p_receive_time", "Seconds from asking for state to having it."),
    "wait_seconds": ("kv_p2p_wait_time", "Seconds of receiving until the state was ready there."),
    "read_seconds": ("kv_p2p_read_time", "Seconds of receiving that bytes took to come."),
    "failed_receives": ("kv_p2p_failed_receives", "Requests whose state could not be fetched."),
    "seal_bytes": ("kv_p2p_seal_bytes", "Bytes of which a digest was made or checked."),
    "seal_seconds": ("kv_p2p_seal_time", "Seconds that transfers spent on digests."),
    "broken_seals": ("kv_p2p_broken_seals", "Requests whose state came with another digest."),
}


class P2pStats(CounterStats):
    """Of one worker or the scheduler."""


class P2pPromMetrics(CounterPromMetrics):
    """`vllm:kv_p2p_*`."""

    counters = COUNTERS
