# SPDX-License-Identifier: Apache-2.0
"""Hands captured hidden states to a trainer on this machine through shared memory.

Needs `speculative_config.method = "extract_hidden_states"`. The trainer reads them with
`vllm.hidden_states_ring.RingReader`. Guide: docs/extraction.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.extra_config import ExtraConfig
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.row_copy import RowCopier
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states.sinks import (
    WHEN_FULL,
    SinkConnector,
    SinkSaver,
    num_bytes_of,
    policy_of,
)
from vllm.exceptions import VLLMValidationError
from vllm.hidden_states_record import Policy
from vllm.hidden_states_ring import RingWriter
from vllm.hidden_states_ring_file import record_bytes
from vllm.hidden_states_storage import STORAGE_DTYPE_KEY
from vllm.v1.kv_cache_interface import KVCacheConfig

_KEYS = ("ring_path", "ring_bytes", WHEN_FULL, STORAGE_DTYPE_KEY)
_DEFAULT_BYTES = 2**30


@dataclass(frozen=True)
class RingSettings:
    """`path` of the ring, its bytes, and what happens when it is full."""

    path: str
    num_bytes: int
    policy: Policy

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RingSettings:
        """Raises `VLLMValidationError` for unknown keys and values that cannot be honoured."""
        extra = ExtraConfig("RingHiddenStatesConnector", given)
        extra.check_keys(_KEYS)
        path = given.get("ring_path")
        if not isinstance(path, str) or not path:
            raise extra.refused("ring_path", path, "name a file, such as /dev/shm/rows")
        return cls(path, num_bytes_of(extra, "ring_bytes", _DEFAULT_BYTES), policy_of(extra))


class RingHiddenStatesConnector(SinkConnector):
    """Store-only. Settings (`kv_connector_extra_config`):

    - `ring_path`, required: a file in a file system in memory; made anew by each engine;
    - `ring_bytes` (1 GiB): its size;
    - `when_full` (`wait`): `wait` for the trainer, `drop_new` rows, or `drop_oldest`;
    - `storage_dtype` (`auto`): `auto` or `fp8_e4m3`.

    Raises ValueError without extraction, for other settings, or while another engine writes there.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = RingSettings.of(self._kv_transfer_config.kv_connector_extra_config)

    def _make_saver(self, copier: RowCopier) -> SinkSaver:
        settings = self._settings
        try:
            ring = RingWriter(settings.path, settings.num_bytes, copier.format)
        except OSError as error:
            raise VLLMValidationError(
                f"RingHiddenStatesConnector: ring_path {settings.path!r} of {settings.num_bytes} "
                f"bytes cannot be made ({error.strerror}); name a file in a directory that is "
                "there, can be written and has room (ring_bytes)",
                parameter="ring_path",
                value=settings.path,
            ) from error
        return SinkSaver(copier, ring, settings.policy, "ring")

    def _no_room(self, num_rows: int, request_id: str) -> str | None:
        size, room = (
            record_bytes(num_rows, self._format.row_bytes, request_id),
            self._settings.num_bytes,
        )
        return f"{size} bytes of rows in a ring of {room}" if size > room else None

    def _place(self) -> dict[str, Any]:
        return {"hidden_states_ring": self._settings.path}
