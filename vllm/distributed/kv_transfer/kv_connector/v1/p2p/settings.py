# SPDX-License-Identifier: Apache-2.0
"""What `kv_connector_extra_config` of `P2pConnector` and `NixlConnector` may say."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.extra_config import ExtraConfig

#: ports of the default list: none that only an administrator may open
_DEFAULT_PORTS = range(1024, 2**16)
_ALL_PORTS = range(1, 2**16)

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class _Entry:
    """A network or a name in lower case, and the ports there."""

    where: _Network | str
    ports: range

    def allows(self, where: _Address | str, port: int) -> bool:
        if port not in self.ports:
            return False
        if isinstance(self.where, str) or isinstance(where, str):
            return self.where == where
        return where in self.where


class AllowedPeers:
    """Which peers a client may name: a request's parameters must not send an engine anywhere.

    Names are compared as text and never resolved, so that no answer of a name server decides.
    Numbers are compared as addresses, however they are written.

    `given`: entries `HOST[:PORT[-PORT]]`, where HOST is a name, an address or a network
    (`10.0.0.0/8`, `[fd00::]/8`); IPv6 needs brackets. None: this machine's loopback addresses and
    `own_host`, at the ports from 1024 on. ValueError for an entry that cannot be read.
    """

    def __init__(self, given: Sequence[str] | None, own_host: str) -> None:
        self.given = given
        if given is not None:
            self._entries = [_parse(entry) for entry in given]
            return
        hosts = ("127.0.0.0/8", "[::1]", "localhost")
        self._entries = [_Entry(_parse(host).where, _DEFAULT_PORTS) for host in hosts]
        own = _where(own_host)
        network = own if isinstance(own, str) else ipaddress.ip_network(own)
        self._entries.append(_Entry(network, _DEFAULT_PORTS))

    def check(self, host: str, ports: Iterable[int]) -> None:
        """ValueError, for the client, if one of these places is not allowed."""
        where = _where(host)
        for port in ports:
            if not any(entry.allows(where, port) for entry in self._entries):
                raise ValueError(
                    f"kv_transfer_params.remote_host: {host!r}, port {port}, is none of the peers "
                    "that this engine may ask for state; its kv_connector_extra_config names them "
                    "in allowed_peers (without that: its own host, ports from 1024 on)"
                )

    def __str__(self) -> str:
        if self.given is not None:
            return ", ".join(self.given) or "none"
        return "its own host, ports from 1024 on"


def _where(host: str) -> _Address | str:
    """An address, or the lower case of what is none."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower()
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _parse(entry: str) -> _Entry:
    refused = ValueError(
        f"{entry!r} is no peer: give HOST, HOST:PORT or HOST:PORT-PORT, where HOST is a name, an "
        "address or a network such as 10.0.0.0/8 or [fd00::]/8"
    )
    if not isinstance(entry, str):
        raise refused
    host, rest = entry, ""
    if entry.startswith("["):
        inside, closed, behind = entry[1:].partition("]")
        bits, _, rest = behind.partition(":")
        host = inside + bits
        if not closed or (bits and not bits.startswith("/")) or ":" not in inside:
            raise refused
    elif ":" in entry:
        host, _, rest = entry.partition(":")
    with_ports = entry.removesuffix(rest).endswith(":")
    try:
        ports = _ports(rest) if with_ports else _ALL_PORTS
        if "/" in host or ":" in host or host.replace(".", "").isdigit():
            return _Entry(ipaddress.ip_network(host), ports)
    except ValueError as error:
        raise refused from error
    if not host or not all(c.isalnum() or c in "-._" for c in host):
        raise refused
    return _Entry(host.lower(), ports)


def _ports(text: str) -> range:
    first, dash, last = text.partition("-")
    ports = range(int(first), int(last if dash else first) + 1)
    if not ports or ports[0] < 1 or ports[-1] >= 2**16:
        raise ValueError(text)
    return ports


_KEYS = ("host", "port", "kv_lease_duration", "timeout_s", "staging_bytes", "allowed_peers")


@dataclass(frozen=True)
class P2pSettings:
    """`host`, `port`: where rank 0 of a producer answers its peers, rank *r* at `port + r`, counted
    over all replicas (0: any free port). `lease_s`: how long a producer keeps state that nobody
    asks for. `timeout_s`: how long a consumer waits for a peer that answers nothing.
    `staging_bytes`: memory per rank and direction that state passes through. `allowed_peers`: where
    a client may send a consumer. `extra`: keys of the transport."""

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
        extra = ExtraConfig("state transfer", transfer.kv_connector_extra_config)
        extra.check_keys((*_KEYS, *transport_keys))
        given = extra.given
        host, port = host_and_port(extra, "the other engines")
        return cls(
            host,
            port,
            float(extra.positive("kv_lease_duration", 30.0)),
            float(extra.positive("timeout_s", 30.0)),
            int(extra.positive("staging_bytes", transfer.kv_buffer_size)),
            _allowed_peers(extra, host),
            {key: given[key] for key in transport_keys if key in given},
        )


def host_and_port(extra: ExtraConfig, peers: str) -> tuple[str, int]:
    """Where to answer `peers`; the environment's side channel unless given, port 0: any free
    one."""
    port = extra.given.get("port", envs.VLLM_NIXL_SIDE_CHANNEL_PORT)
    if type(port) is not int or not 0 <= port < 2**16:
        raise extra.refused("port", port, "give a port, or 0 for any")
    host = extra.given.get("host", envs.VLLM_NIXL_SIDE_CHANNEL_HOST)
    if not isinstance(host, str) or not host:
        raise extra.refused("host", host, f"give an address that {peers} can reach")
    return host, port


def _allowed_peers(extra: ExtraConfig, own_host: str) -> AllowedPeers:
    given = extra.given.get("allowed_peers")
    if given is not None and not isinstance(given, list | tuple):
        raise extra.refused("allowed_peers", given, "give a list of hosts and networks")
    try:
        return AllowedPeers(given, own_host)
    except ValueError as error:
        raise extra.refused("allowed_peers", given, str(error)) from error
