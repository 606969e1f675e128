# SPDX-License-Identifier: Apache-2.0
"""`P2pConnector` whose bytes NIXL moves; see docs/disaggregation.md."""

from vllm.distributed.kv_transfer.kv_connector.v1.p2p import staging_device
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.nixl_transport import NixlTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.settings import P2pSettings
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import Transport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p_connector import P2pConnector


class NixlConnector(P2pConnector):
    """`backends`: NIXL's back ends to load, `["UCX"]` unless given. `staging_device`: where state
    waits for peers and arrives, `p2p.staging_device`. ImportError without the library."""

    transport_keys = ("backends", staging_device.KEY)

    @classmethod
    def staging_choice(cls, settings: P2pSettings, device_type: str) -> staging_device.Choice:
        wanted = settings.extra.get(staging_device.KEY, staging_device.DEFAULT)
        return staging_device.choose(wanted, device_type)

    def make_transport(self, rank: int) -> Transport:
        backends = self._settings.extra.get("backends", ["UCX"])
        return NixlTransport(f"{self._kv_transfer_config.engine_id}-{rank}", backends)
