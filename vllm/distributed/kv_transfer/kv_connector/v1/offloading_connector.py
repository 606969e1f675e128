# SPDX-License-Identifier: Apache-2.0
"""Keeps what the prefix cache has to give up in host memory and files; see docs/offloading.md.

Any kind of state: whole blocks of the arena move, so nothing here knows what a layer keeps.
"""

import os
from typing import Any

from torch import Tensor

from vllm import decisions
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.arena_connector import ArenaConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.capabilities import StateTier
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.arrival import arrival_device_bytes
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import FileStore, store_identity
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.host_memory import HostMemory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import (
    MovedBlock,
    OffloadingMetadata,
    OffloadingPromMetrics,
    OffloadingStats,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduling import OffloadingScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.settings import (
    OffloadingSettings,
    check_engine,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.tiers import Tier
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.transfers import Transfers
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import ForwardContext
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import ArenaPlan, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request


class OffloadingConnector(ArenaConnector):
    """Settings: `offloading.settings`. ValueError without a prefix cache or a page of memory."""

    stats_class = OffloadingStats
    metrics_class = OffloadingPromMetrics

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        self._settings = OffloadingSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        plan = self._config.plan
        self._host_pages = self._settings.host_pages(plan, self._num_ranks)
        self._file_pages = self._settings.file_pages(plan, self._num_ranks)
        # scheduler side
        self._files: FileStore | None = None
        self._scheduling: OffloadingScheduler
        # worker side
        self._transfers: Transfers | None = None
        self._reports = OffloadingWorkerMetadata()
        self._load_blocks: dict[str, list[MovedBlock]] = {}
        self._stats = OffloadingStats()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduling = self._make_scheduling(plan)

    def _make_scheduling(self, plan: ArenaPlan) -> OffloadingScheduler:
        self._files = self._file_store(rank=0)
        new_policy = self._settings.new_policy
        decisions.record(
            "state offloading",
            f"{self._host_pages} pages of host memory"
            + (f", {self._file_pages} pages of files" if self._file_pages else ""),
            f"a page takes {plan.page_bytes} bytes on each of {self._num_ranks} ranks",
        )
        return OffloadingScheduler(
            self._config,
            Tier(plan, self._host_pages, new_policy()),
            None if self._files is None else Tier(plan, self._file_pages, new_policy()),
            self._num_ranks,
            () if self._files is None else self._files.names(),
        )

    def _file_store(self, rank: int) -> FileStore | None:
        if self._settings.files is None:
            return None
        identity = store_identity(self._vllm_config, self._config)
        # Counted over all replicas: each has its own limit, and removes what is over it.
        parallel = self._vllm_config.parallel_config
        rank += parallel.data_parallel_rank * parallel.world_size
        return FileStore(self._settings.files.root_dir, identity, rank)

    @classmethod
    def loads_drafter_rows(cls, kv_transfer_config: KVTransferConfig, num_ahead: int) -> bool:
        return True  # tiers are searched as the device's cache is, by the groups' own managers

    @classmethod
    def device_bytes(cls, kv_transfer_config: KVTransferConfig, device_type: str) -> int:
        return arrival_device_bytes(device_type)

    @classmethod
    def state_tiers(
        cls, kv_transfer_config: KVTransferConfig, plan: ArenaPlan, num_ranks: int
    ) -> list[StateTier]:
        settings = OffloadingSettings.of(kv_transfer_config.kv_connector_extra_config)
        tiers = [StateTier("host memory", settings.host_pages(plan, num_ranks))]
        if settings.files is not None:
            tiers.append(StateTier("files", settings.file_pages(plan, num_ranks)))
        return tiers

    # ---- worker side ---------------------------------------------------------------------------

    def register_arena(self, arena: Tensor, plan: ArenaPlan) -> None:
        host = HostMemory(plan, self._host_pages, pinned=arena.is_cuda)
        files = self._file_store(get_tensor_model_parallel_rank())
        self._transfers = Transfers(arena, plan, host, files, self.transfer_ended)

    @property
    def _moves(self) -> Transfers:
        assert self._transfers is not None, "no arena was registered"
        return self._transfers

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, OffloadingMetadata)
        if kv_connector_metadata.deletes:  # of files that the stores may write anew
            self._moves.delete(kv_connector_metadata.deletes)
        if kv_connector_metadata.stores is not None:
            self._moves.store(kv_connector_metadata.stores)
        if kv_connector_metadata.overwrites:
            self._moves.before_overwriting()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, OffloadingMetadata)
        for job in metadata.loads:
            self._load_blocks[job.req_id] = job.blocks
            self._moves.load(job)
        if get_tensor_model_parallel_rank() == 0:
            self._stats.add(**metadata.counts)
            self._stats.data.update(metadata.gauges)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded = self._moves.take_loaded()
        for req_id, failed in loaded.items():
            blocks = self._load_blocks.pop(req_id)
            for i in failed:
                group, device_block, host_block, _ = blocks[i]
                self._load_errors.add((group, device_block))
                self._reports.broken.add((group, host_block))
        return None, set(loaded) or None

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        reports, self._reports = self._reports, OffloadingWorkerMetadata()
        reports.copied, reports.written = self._moves.take_stored()
        return reports if reports != OffloadingWorkerMetadata() else None

    def get_kv_connector_stats(self) -> OffloadingStats | None:
        stats, self._stats = self._stats.aggregate(self._moves.take_stats()), OffloadingStats()
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None

    # ---- scheduler side ------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        gpu_block_pool.observers.append(self._scheduling.stores)

    def get_prefix_hash_root(self) -> bytes | None:
        if self._files is None or "PYTHONHASHSEED" in os.environ:
            return None
        return self._files.hash_root()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens = self._scheduling.loads.num_matched(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduling.loads.begin(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingMetadata:
        return self._scheduling.build_metadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduling.update(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.loads.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        return self._scheduling.has_work()

    def reset_cache(self) -> bool | None:
        self._scheduling.reset()
        return True
