# SPDX-License-Identifier: Apache-2.0
"""The scheduler's conversation with its KV connector (order of calls: the connector base class)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

logger = init_logger(__name__)


def create_scheduler_connector(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> KVConnectorBase_V1 | None:
    """The scheduler-side connector, or None when no KV transfer is configured."""
    transfer_config = vllm_config.kv_transfer_config
    if transfer_config is None or not transfer_config.is_kv_transfer_instance:
        return None
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    return KVConnectorFactory.create_connector(
        vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config
    )


class KVTransfer:
    """Which requests wait for transfers, and the calls into the connector.

    `loading`: requests whose prefix is being fetched; their blocks must not be freed.
    `received`: loads that ended, not yet scheduled. `sending`: finished requests whose blocks the
    connector still reads.
    """

    def __init__(
        self,
        connector: KVConnectorBase_V1,
        kv_cache_config: KVCacheConfig,
        manager: KVCacheManager,
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

        self.connector = connector
        self.loading: set[str] = set()
        self.received: set[str] = set()
        self.sending: set[str] = set()
        self._manager = manager
        self._all_groups = supports_hma(connector)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._block_sizes = [spec.block_size for spec in specs]
        self._recurrent = any(isinstance(spec, MambaSpec) for spec in specs)
        connector.bind_gpu_block_pool(manager.block_pool)

    def is_tracking(self, request_id: str) -> bool:
        """Whether a transfer still needs the request's blocks."""
        return request_id in self.loading or request_id in self.sending

    def holds_blocks(self, request_id: str) -> bool:
        """Whether a waiting request holds blocks because of a load."""
        return request_id in self.loading or request_id in self.received

    def begin_load(self, request_id: str) -> None:
        self.loading.add(request_id)

    def after_allocation(self, request: Request, num_external_tokens: int) -> None:
        blocks = self._manager.get_blocks(request.request_id)
        self.connector.update_state_after_alloc(request, blocks, num_external_tokens)

    def fill_metadata(self, output: SchedulerOutput) -> None:
        output.kv_connector_metadata = self.connector.build_connector_meta(output)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Tell the connector; (whether a transfer keeps the blocks, parameters for the client)."""
        request_id = request.request_id
        self.received.discard(request_id)
        block_ids = self._manager.get_block_ids(request_id)
        if self._all_groups:
            delay, params = self.connector.request_finished_all_groups(request, block_ids)  # type: ignore[attr-defined]
        else:
            delay, params = self.connector.request_finished(request, block_ids[0])
        if delay:
            self.sending.add(request_id)
        return delay or request_id in self.loading, params

    def update(self, output: KVConnectorOutput) -> list[str]:
        """Take a step's report; returns ids of which no transfer needs the blocks any more."""
        self.connector.update_connector_output(output)
        ended: list[str] = []
        for request_id in output.finished_recving or ():
            if request_id not in self.loading:
                logger.warning("connector reports a load for %s, which has none", request_id)
                continue
            self.loading.remove(request_id)
            self.received.add(request_id)
            ended.append(request_id)
        for request_id in output.finished_sending or ():
            if request_id not in self.sending:
                logger.warning("connector reports a send for %s, which has none", request_id)
                continue
            self.sending.remove(request_id)
            ended.append(request_id)
        return ended

    def num_valid_tokens(self, request: Request, invalid_block_ids: set[int]) -> int | None:
        """Computed tokens before the first block that failed to load; None: all are valid.

        Recurrent state has no value in the middle, so with such a group nothing is valid.
        """
        valid: int | None = None
        block_ids = self._manager.get_block_ids(request.request_id)
        for size, ids in zip(self._block_sizes, block_ids, strict=True):
            bad = next((i for i, b in enumerate(ids) if b in invalid_block_ids), None)
            if bad is not None:
                tokens = 0 if self._recurrent else bad * size
                valid = tokens if valid is None else min(valid, tokens)
        if valid is None or valid >= request.num_computed_tokens:
            return None
        return valid
