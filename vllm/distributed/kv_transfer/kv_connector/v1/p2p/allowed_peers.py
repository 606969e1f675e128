# SPDX-License-Identifier: Apache-2.0
"""Which peers a client may name: a request's parameters must not send an engine anywhere.

Names are compared as text and never resolved, so that no answer of a name server decides. Numbers
are compared as addresses, however they are written.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    """`given`: entries `HOST[:PORT[-PORT]]`, where HOST is a name, an address or a network
    (`10.0.0.0/8`, `[fd00::]/8`); IPv6 needs brackets. None: this machine's loopback addresses and
    `own_host`, at the ports from 1024 on. ValueError for an entry that cannot be read."""

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
