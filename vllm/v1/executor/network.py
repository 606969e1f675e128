# SPDX-License-Identifier: Apache-2.0
"""The network interfaces of this host."""

from __future__ import annotations

import socket

import psutil


def interface_of(address: str) -> str | None:
    """The network interface of this host that has the numeric `address`."""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            internet = one.family in (socket.AF_INET, socket.AF_INET6)
            if internet and one.address.partition("%")[0] == address:
                return name
    return None
