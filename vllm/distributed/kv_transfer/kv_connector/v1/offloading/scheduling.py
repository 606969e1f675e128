# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of offloading: stores, loads and the tiers between them, step by step."""

from collections import Counter
from collections.abc import Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import FileNames, parse_name
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.loads import LoadScheduling
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import (
    OffloadingMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.stores import StoreScheduling
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.tiers import Tier
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, Tail
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput


class OffloadingScheduler:
    """Decides transfers of `num_ranks` workers. `names`: the files there are from earlier, those
    used longest ago first."""

    def __init__(
        self,
        config: KVCacheConfig,
        host: Tier,
        files: Tier | None,
        num_ranks: int,
        names: Iterable[str] = (),
    ) -> None:
        self._host, self._files = host, files
        self._deletes: list[str] = []
        self._counts: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        self._names = FileNames()
        self.stores = StoreScheduling(
            host, files, num_ranks, self._names, self._deletes, self._counts
        )
        self.loads = LoadScheduling(config, host, files, self._names, self._counts)
        if files is not None:
            files.observers.append(_Deleted(self._names, self._deletes))
            self._index(files, names)

    @staticmethod
    def _index(files: Tier, names: Iterable[str]) -> None:
        """Take in the files there are; what does not fit any more goes, the oldest first."""
        for name in names:
            try:
                key, tail = parse_name(name)
            except ValueError:
                continue
            block = files.take(key)
            assert block is not None
            files.publish(block, key, tail)
            files.free_blocks([block])

    def build_metadata(self) -> OffloadingMetadata:
        """The step's transfers; call at the end of every `schedule()`."""
        loads = self.loads.take_jobs()
        stores = self.stores.take_job()
        overwrites = self.stores.take_overwrites()
        deletes = self._deletes[:]
        self._deletes.clear()
        counts = {key: float(count) for key, count in self._counts.items()}
        self._counts.clear()
        return OffloadingMetadata(
            stores, loads, overwrites, deletes, counts, self._changed_gauges()
        )

    def _changed_gauges(self) -> dict[str, float]:
        plan = self._host.plan
        gauges = {
            "host_bytes": float((plan.num_pages - 1) * plan.page_bytes),
            "host_used_bytes": float(self._host.used_bytes),
        }
        if self._files is not None:
            plan = self._files.plan
            gauges["file_bytes"] = float((plan.num_pages - 1) * plan.page_bytes)
            gauges["file_used_bytes"] = float(self._files.used_bytes)
        if gauges == self._gauges:
            return {}
        self._gauges = gauges
        return gauges

    def update(self, output: KVConnectorOutput) -> None:
        """Take a step's reports."""
        reports = output.kv_connector_worker_meta
        if isinstance(reports, OffloadingWorkerMetadata):
            self.loads.note_broken(reports.broken)
            self.stores.take_reports(reports)
        for request_id in output.finished_recving or ():
            self.stores.note_loaded(self.loads.end(request_id))

    def has_work(self) -> bool:
        """Whether transfers go on, or wait for a step to begin in."""
        return bool(self.stores.has_work or self._deletes or self.loads.has_work)

    def reset(self) -> None:
        """Forget everything; what is on its way is worth nothing when it arrives. What comes may
        be of other weights, so its files are found by this engine alone."""
        self.stores.reset()
        self.loads.reset()
        for tier in (self._host, self._files):
            if tier is not None:
                tier.reset_prefix_cache(held_too=True)
        self._names.renew()


class _Deleted:
    """Notes the files of blocks that the file tier forgets."""

    def __init__(self, names: FileNames, deletes: list[str]) -> None:
        self._names, self._deletes = names, deletes

    def cached(self, block: KVCacheBlock, key: BlockHashWithGroupId, tail: Tail | None) -> None:
        return

    def evicted(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self._deletes.append(self._names.of(block.block_hash, None))
        self._deletes += [self._names.of(tail.key, tail) for tail in block.tails]

    def invalidated(self, block: KVCacheBlock) -> None:
        return
