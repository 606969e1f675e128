# SPDX-License-Identifier: Apache-2.0
"""Hands captured hidden states to trainers on other machines.

Needs `speculative_config.method = "extract_hidden_states"`. A trainer reads them with
`vllm.hidden_states_stream.RemoteRows`. Guide: docs/extraction.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.extra_config import ExtraConfig
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import RowCopier
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_stream import (
    RowStream,
    stream_bytes,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.sinks import (
    WHEN_FULL,
    SinkConnector,
    SinkSaver,
    num_bytes_of,
    policy_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.settings import host_and_port
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.tcp_transport import TcpTransport
from vllm.distributed.kv_transfer.kv_connector.v1.p2p.transport import Transport
from vllm.hidden_states_record import Policy
from vllm.hidden_states_storage import STORAGE_DTYPE_KEY
from vllm.v1.kv_cache_interface import KVCacheConfig

_KEYS = ("host", "port", "stream_bytes", WHEN_FULL, "lease_s", STORAGE_DTYPE_KEY)
_DEFAULT_BYTES = 2**30
_DEFAULT_LEASE_S = 10.0


@dataclass(frozen=True)
class StreamHandshake(KVConnectorHandshakeMetadata):
    """Where the rank that stores answers readers."""

    port: int


@dataclass(frozen=True)
class StreamSettings:
    """`host`, `port` (0: any free one): where readers ask. `num_bytes`: memory for records.
    `policy`: what happens when it is full. `lease_s`: how long a reader has for one record, and an
    engine that ends waits for readers that do nothing."""

    host: str
    port: int
    num_bytes: int
    policy: Policy
    lease_s: float

    @classmethod
    def of(cls, extra: ExtraConfig, transport_keys: tuple[str, ...]) -> StreamSettings:
        """Raises `VLLMValidationError` for unknown keys and values that cannot be honoured."""
        extra.check_keys((*_KEYS, *transport_keys))
        host, port = host_and_port(extra, "the trainers")
        num_bytes = num_bytes_of(extra, "stream_bytes", _DEFAULT_BYTES)
        lease_s = float(extra.positive("lease_s", _DEFAULT_LEASE_S))
        return cls(host, port, num_bytes, policy_of(extra), lease_s)


class StreamHiddenStatesConnector(SinkConnector):
    """Store-only. Bytes move over TCP. Settings (`kv_connector_extra_config`):

    - `host`, `port`: where trainers ask, each data-parallel replica at the next port; 0: any;
    - `stream_bytes` (1 GiB): host memory for what no trainer has fetched;
    - `when_full` (`wait`): `wait` for the trainer, `drop_new` rows, or `drop_oldest`;
    - `lease_s` (10): how long a trainer may take to fetch a record;
    - `storage_dtype` (`auto`): `auto` or `fp8_e4m3`.

    Raises ValueError without extraction or for other settings; OSError for a port in use.
    """

    transport_name = "tcp"
    #: keys of `kv_connector_extra_config` that are the transport's
    transport_keys: tuple[str, ...] = ()

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = ExtraConfig(type(self).__name__, self._kv_transfer_config.kv_connector_extra_config)
        self._settings = StreamSettings.of(extra, self.transport_keys)
        self._stream: RowStream | None = None
        #: scheduler side: where readers ask, which the worker knows when the port is any free one
        self._port = self._first_port

    def make_transport(self) -> Transport:
        """What moves the bytes."""
        return TcpTransport()

    @classmethod
    def supports_several_hosts(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Trainers are told one host, whichever rank stores."""
        return False

    @property
    def _first_port(self) -> int:
        port = self._settings.port
        return port + self._vllm_config.parallel_config.data_parallel_rank if port else 0

    # ---- worker side ---------------------------------------------------------------------------

    def _make_saver(self, copier: RowCopier) -> SinkSaver:
        settings, row_format = self._settings, copier.format
        rows = {
            "layer_ids": self._layer_ids,
            "hidden_size": row_format.hidden,
            "dtype": str(row_format.dtype).removeprefix("torch."),
            "storage": row_format.storage,
        }
        self._stream = RowStream(
            (settings.host, self._first_port),
            settings.num_bytes,
            row_format,
            settings.lease_s,
            self.make_transport(),
            {"transport": self.transport_name, "rows": rows},
        )
        return SinkSaver(copier, self._stream, settings.policy, "stream")

    def get_handshake_metadata(self) -> StreamHandshake | None:
        return None if self._stream is None else StreamHandshake(self._stream.port)

    # ---- scheduler side ------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        [told] = [one for one in metadata.values() if isinstance(one, StreamHandshake)]
        self._port = told.port

    def _no_room(self, num_rows: int, request_id: str) -> str | None:
        size = stream_bytes(num_rows, self._format.row_bytes, request_id)
        room = self._settings.num_bytes
        return f"{size} bytes of rows in a stream of {room}" if size > room else None

    def _place(self) -> dict[str, Any]:
        return {"hidden_states_stream": f"{self._settings.host}:{self._port}"}
