# SPDX-License-Identifier: Apache-2.0
"""`StreamHiddenStatesConnector` whose bytes NIXL moves; see docs/extraction.md."""

import uuid

from vllm.distributed.kv_transfer.kv_connector.v1.p2p.nixl_transport import NixlTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import Transport
from vllm.distributed.kv_transfer.kv_connector.v1.stream_hidden_states_connector import (
    StreamHiddenStatesConnector,
)


class NixlHiddenStatesConnector(StreamHiddenStatesConnector):
    """`backends`: NIXL's back ends to load, `["UCX"]` unless given. ImportError without the
    library."""

    transport_name = "nixl"
    transport_keys = ("backends",)

    def make_transport(self) -> Transport:
        extra = self._kv_transfer_config.kv_connector_extra_config
        return NixlTransport(f"engine-{uuid.uuid4().hex}", extra.get("backends", ["UCX"]))
