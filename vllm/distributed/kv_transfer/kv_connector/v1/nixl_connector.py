# SPDX-License-Identifier: Apache-2.0
"""`P2pConnector` whose bytes NIXL moves; see docs/disaggregation.md."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.nixl_transport import NixlTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import Transport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p_connector import P2pConnector


class NixlConnector(P2pConnector):
    """`backends`: NIXL's back ends to load, `["UCX"]` unless given. ImportError without the
    library."""

    transport_keys = ("backends",)

    def make_transport(self, rank: int) -> Transport:
        backends = self._settings.extra.get("backends", ["UCX"])
        return NixlTransport(f"{self._kv_transfer_config.engine_id}-{rank}", backends)
