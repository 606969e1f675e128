# SPDX-License-Identifier: Apache-2.0
"""What `kv_connector_extra_config` of `P2pConnector` and `NixlConnector` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.allowed_peers import AllowedPeers
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

_KEYS = ("host", "port", "kv_lease_duration", "timeout_s", "staging_bytes", "allowed_peers")


@dataclass(frozen=True)
class P2pSettings:
    """`host`, `port`: where rank 0 of a producer answers its peers, rank *r* at `port + r`, counted
    over all replicas (0: any free port). `lease_s`: how long a producer keeps state that nobody
    asks for. `timeout_s`: how long a consumer waits for one request's state. `staging_bytes`: host
    memory per rank and direction that state passes through. `allowed_peers`: where a client may
    send a consumer. `extra`: keys of the transport."""

    host: str
    port: int
    lease_s: float
    timeout_s: float
    staging_bytes: int
    allowed_peers: AllowedPeers
    extra: dict[str, Any]

    @classmethod
    def of(cls, transfer: KVTransferConfig, transport_keys: tuple[str, ...] = ()) -> P2pSettings:
        """Raises `VLLMValidationError` for unknown keys and values that cannot be honoured."""
        given = transfer.kv_connector_extra_config
        for key in given:
            if key not in (*_KEYS, *transport_keys):
                known = ", ".join((*_KEYS, *transport_keys))
                raise _refused(key, given[key], f"kv_connector_extra_config knows {known}")
        port = given.get("port", envs.VLLM_NIXL_SIDE_CHANNEL_PORT)
        if type(port) is not int or not 0 <= port < 2**16:
            raise _refused("port", port, "give a port, or 0 for any")
        host = given.get("host", envs.VLLM_NIXL_SIDE_CHANNEL_HOST)
        if not isinstance(host, str) or not host:
            raise _refused("host", host, "give an address that the other engines can reach")
        return cls(
            host,
            port,
            _positive(given, "kv_lease_duration", 30.0),
            _positive(given, "timeout_s", 30.0),
            int(_positive(given, "staging_bytes", transfer.kv_buffer_size)),
            _allowed_peers(given.get("allowed_peers"), host),
            {key: given[key] for key in transport_keys if key in given},
        )


def _positive(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise _refused(key, value, "give a positive number")
    return float(value)


def _allowed_peers(given: Any, own_host: str) -> AllowedPeers:
    if given is not None and not isinstance(given, list | tuple):
        raise _refused("allowed_peers", given, "give a list of hosts and networks")
    try:
        return AllowedPeers(given, own_host)
    except ValueError as error:
        raise _refused("allowed_peers", given, str(error)) from error


def _refused(key: str, value: Any, instead: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"state transfer: {key} {value!r}: {instead}", parameter=key, value=value
    )
