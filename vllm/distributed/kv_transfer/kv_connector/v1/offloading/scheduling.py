# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: what leaves the device when, and what a waiting request gets back.

Stores follow the device's prefix cache: whatever it can find is copied once, at the beginning of
the step after the one that completed it, before anything of that step is written. Nothing on the
device is held for that: a block that is reused meanwhile makes the step wait for the copy, in
stream order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import file_name, parse_name
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import (
    JobReport,
    LoadedBlock,
    LoadJob,
    OffloadingMetadata,
    OffloadingWorkerMetadata,
    StoredBlock,
    StoreJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.tiers import Tier, TierSearch
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, Tail, get_group_id
from vllm.v1.core.prefix_cache import reads_prefix_cache
from vllm.v1.core.prefix_lookup import PrefixMatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

#: group and block on the device
Place = tuple[int, int]


@dataclass
class _Content:
    """What a device block holds under `key`."""

    key: BlockHashWithGroupId
    tail: Tail | None


@dataclass
class _Stored:
    """A block of a store job. `file`: its place in the file tier, if it goes there. `valid`: it
    holds what its key says."""

    place: Place
    key: BlockHashWithGroupId
    tail: Tail | None
    host: KVCacheBlock
    file: KVCacheBlock | None
    valid: bool = True


@dataclass
class _Loaded:
    """A block of a load. `file`: where `host` is filled from, if it has to be."""

    place: Place
    host: KVCacheBlock
    file: KVCacheBlock | None
    key: BlockHashWithGroupId | None
    tail: Tail | None


@dataclass
class _Store:
    """A job in flight, until every rank has reported it from host memory and from files."""

    blocks: list[_Stored]
    copied: JobReport = JobReport(0)
    written: JobReport = JobReport(0)


@dataclass
class _Found:
    """A look-up, and the tiers' versions and known tokens it holds for."""

    versions: tuple[int, ...]
    num_tokens: int
    match: PrefixMatch


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
        self._num_ranks = num_ranks
        self._search = TierSearch(config, host, files)
        self._block_sizes = [g.kv_cache_spec.block_size for g in config.kv_cache_groups]
        self._recurrent = [g.kv_cache_spec.is_recurrent for g in config.kv_cache_groups]
        #: what the step being scheduled fills: complete when it was sent
        self._filling: dict[Place, list[_Content]] = {}
        #: what is complete and in no tier yet, the oldest first: it leaves as host memory has room
        self._waiting: dict[Place, list[_Content]] = {}
        #: complete content of blocks that the step being scheduled overwrites: leaves now or never
        self._overwritten: dict[Place, list[_Content]] = {}
        #: keys on their way to the host
        self._leaving: set[BlockHashWithGroupId] = set()
        #: device blocks whose content was sent to the host since they got it: key by key
        self._sent: dict[Place, list[BlockHashWithGroupId]] = {}
        #: device blocks that are being copied out
        self._read: Counter[Place] = Counter()
        self._stores: dict[int, _Store] = {}
        self._num_stores = 0
        self._matches: dict[str, _Found] = {}
        self._loads: dict[str, list[_Loaded]] = {}
        self._new_loads: list[str] = []
        self._broken: set[tuple[int, int]] = set()
        self._overwrites = False
        self._deletes: list[tuple[int, str]] = []
        self._counts: Counter[str] = Counter()
        self._gauges: dict[str, float] = {}
        if files is not None:
            files.observers.append(_Deleted(self._deletes))
            self._index(files, names)

    @staticmethod
    def _index(files: Tier, names: Iterable[str]) -> None:
        """Take in the files there are; what does not fit any more goes, the oldest first."""
        for name in names:
            try:
                key, tail = parse_name(name)
            except ValueError:
                continue
            block = files.take(get_group_id(key))
            assert block is not None
            files.publish(block, key, tail)
            files.free_blocks([block])

    # ---- what the device's cache holds ---------------------------------------------------------

    def cached(self, block: KVCacheBlock, key: BlockHashWithGroupId, tail: Tail | None) -> None:
        place = block.group_id, block.block_id
        contents = self._filling if tail is None else self._waiting
        contents.setdefault(place, []).append(_Content(key, tail))

    def evicted(self, block: KVCacheBlock) -> None:
        place = block.group_id, block.block_id
        self._sent.pop(place, None)
        filling, waiting = self._filling.pop(place, None), self._waiting.pop(place, None)
        if waiting is not None:
            self._overwritten.setdefault(place, []).extend(waiting)
        if filling is not None or waiting is not None or self._read[place]:
            self._overwrites = True

    def invalidated(self, block: KVCacheBlock) -> None:
        place = block.group_id, block.block_id
        for contents in (self._filling, self._waiting, self._overwritten):
            contents.pop(place, None)
        for key in self._sent.pop(place, ()):
            self._discard(key)
        for store in self._stores.values():
            for stored in store.blocks:
                if stored.place == place and stored.valid:
                    stored.valid = False
                    self._leaving.discard(stored.key)

    def _discard(self, key: BlockHashWithGroupId) -> None:
        """Forget content that turned out to be wrong, in every tier."""
        for tier in (self._host, self._files):
            block = None if tier is None else tier.block_of(key)
            if tier is not None and block is not None:
                tier.uncache_block(block)

    # ---- out of the device ---------------------------------------------------------------------

    def _take_store(self) -> StoreJob | None:
        """What is complete and in no tier yet, as the step's store, as far as there is room."""
        blocks: list[_Stored] = []
        for place, contents in self._overwritten.items():
            self._counts["skipped_blocks"] += len(self._to_store(place, contents, blocks))
        self._overwritten.clear()
        while self._waiting:
            place, contents = next(iter(self._waiting.items()))
            left = self._to_store(place, contents, blocks)
            if left:
                self._waiting[place] = left
                break
            del self._waiting[place]
        for place, contents in self._filling.items():
            self._waiting.setdefault(place, []).extend(contents)
        self._filling.clear()
        if not blocks:
            return None
        self._num_stores += 1
        self._stores[self._num_stores] = _Store(blocks)
        sent = [
            StoredBlock(
                *stored.place,
                stored.host.block_id,
                None if stored.file is None else file_name(stored.key, stored.tail),
            )
            for stored in blocks
        ]
        return StoreJob(self._num_stores, sent)

    def _to_store(
        self, place: Place, contents: list[_Content], blocks: list[_Stored]
    ) -> list[_Content]:
        """Append to `blocks` what no tier has; what host memory has no room for."""
        for i, content in enumerate(contents):
            key = content.key
            if key in self._leaving:
                continue
            known = self._host.block_of(key)
            if known is not None:
                self._host.refresh([known])
                continue
            host = self._host.take(place[0])
            if host is None:
                return contents[i:]
            file = None
            if self._files is not None and self._files.block_of(key) is None:
                file = self._files.take(place[0])
            self._leaving.add(key)
            self._sent.setdefault(place, []).append(key)
            self._read[place] += 1
            blocks.append(_Stored(place, key, content.tail, host, file))
        return []

    def _take_reports(self, reports: OffloadingWorkerMetadata) -> None:
        """A job's report of files may come before that of host memory."""
        for job_id, report in reports.copied.items():
            store = self._stores[job_id]
            store.copied = store.copied.joined(report)
            if store.copied.num_ranks == self._num_ranks:
                self._end_copies(store)
        for job_id, report in reports.written.items():
            store = self._stores[job_id]
            store.written = store.written.joined(report)
        for job_id in {*reports.copied, *reports.written}:
            store = self._stores[job_id]
            if store.copied.num_ranks < self._num_ranks:
                continue
            if all(stored.file is None for stored in store.blocks):
                del self._stores[job_id]
            elif store.written.num_ranks == self._num_ranks:
                self._end_writes(store)
                del self._stores[job_id]

    def _end_copies(self, store: _Store) -> None:
        """Look-ups find the blocks; those that go to files stay until they are there."""
        for i, stored in enumerate(store.blocks):
            self._read[stored.place] -= 1
            if not self._read[stored.place]:
                del self._read[stored.place]
            if stored.valid and i not in store.copied.failed:
                self._host.publish(stored.host, stored.key, stored.tail)
            if stored.file is None:
                self._release(stored)

    def _end_writes(self, store: _Store) -> None:
        assert self._files is not None
        for i, stored in enumerate(store.blocks):
            if stored.file is None:
                continue
            if stored.valid and i not in store.written.failed:
                self._files.publish(stored.file, stored.key, stored.tail)
            else:
                self._deletes.append((stored.place[0], file_name(stored.key, stored.tail)))
            self._files.free_blocks([stored.file])
            self._release(stored)

    def _release(self, stored: _Stored) -> None:
        self._host.free_blocks([stored.host])
        if stored.valid:
            self._leaving.discard(stored.key)

    # ---- to the device -------------------------------------------------------------------------

    def num_matched(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens past `num_computed_tokens` that the tiers can give every group back."""
        if not reads_prefix_cache(request):
            return 0
        match = self._find(request)
        if match.num_tokens > num_computed_tokens and not self._has_room(match):
            match = self._search.find(request, host_only=True)
            self._matches[request.request_id].match = match
        return max(0, match.num_tokens - num_computed_tokens)

    def _find(self, request: Request) -> PrefixMatch:
        """The longest prefix in all tiers, searched again only if they have changed."""
        versions = self._host.version, 0 if self._files is None else self._files.version
        found = self._matches.get(request.request_id)
        if found is None or (found.versions, found.num_tokens) != (versions, request.num_tokens):
            found = _Found(versions, request.num_tokens, self._search.find(request))
            self._matches[request.request_id] = found
        return found.match

    def _has_room(self, match: PrefixMatch) -> bool:
        """Whether host memory can take what has to be read from files."""
        demands, held = [0] * len(match.hits), []
        for group, hit in enumerate(match.hits):
            for block in (*hit.blocks, hit.source):
                if block is None or block.is_null:
                    continue
                if self._host.owns(block):
                    held.append(block)
                else:
                    demands[group] += 1
        return not any(demands) or self._host.can_allocate(demands, held)

    def begin_load(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request got blocks: bring `num_external_tokens` of its prefix there, if any."""
        found = self._matches.pop(request.request_id, None)
        if found is None:
            return
        match = found.match
        for hit in match.hits:
            blocks_found = [b for b in (*hit.blocks, hit.source) if b is not None and not b.is_null]
            self._host.refresh(b for b in blocks_found if self._host.owns(b))
        self._counts["query_tokens"] += request.num_tokens - 1
        if not num_external_tokens:
            return
        self._counts["hit_tokens"] += num_external_tokens
        start = match.num_tokens - num_external_tokens
        ids = blocks.get_block_ids()
        wanted: list[tuple[Place, KVCacheBlock]] = []
        for group, hit in enumerate(match.hits):
            size = self._block_sizes[group]
            for i in range(start // size, len(hit.blocks)):
                if not hit.blocks[i].is_null:
                    wanted.append(((group, ids[group][i]), hit.blocks[i]))
            if hit.source is not None:
                last = 0 if self._recurrent[group] else match.num_tokens // size
                wanted.append(((group, ids[group][last]), hit.source))
        # Held before any slot is taken, which could evict them.
        for _, block in wanted:
            (self._host if self._host.owns(block) else self._file_tier).touch([block])
        loads = [self._to_load(place, block) for place, block in wanted]
        self._loads[request.request_id] = loads
        self._new_loads.append(request.request_id)

    @property
    def _file_tier(self) -> Tier:
        assert self._files is not None
        return self._files

    def _to_load(self, place: Place, block: KVCacheBlock) -> _Loaded:
        if self._host.owns(block):
            return _Loaded(place, block, None, None, None)
        host = self._host.take(place[0])
        assert host is not None, "room for it was checked"
        tail = block.tails[0] if block.tails else None
        key = block.block_hash if tail is None else tail.key
        assert key is not None
        return _Loaded(place, host, block, key, tail)

    def _end_load(self, request_id: str) -> None:
        """Let go of what was read; broken content goes, what came from files stays in the host."""
        for loaded in self._loads.pop(request_id, ()):
            host, file = loaded.host, loaded.file
            slot = host.group_id, host.block_id
            broken = slot in self._broken
            self._broken.discard(slot)
            if file is not None:
                if broken:
                    self._file_tier.uncache_block(file)
                else:
                    assert loaded.key is not None
                    self._host.publish(host, loaded.key, loaded.tail)
                self._file_tier.free_blocks([file])
            elif broken:
                self._host.uncache_block(host)
            self._host.free_blocks([host])

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._matches.pop(request_id, None)

    # ---- around a step -------------------------------------------------------------------------

    def build_metadata(self) -> OffloadingMetadata:
        """The step's transfers; call at the end of every `schedule()`."""
        loads = [
            LoadJob(request_id, [self._message(loaded) for loaded in self._loads[request_id]])
            for request_id in self._new_loads
        ]
        self._new_loads.clear()
        stores = self._take_store()
        overwrites, self._overwrites = self._overwrites, False
        deletes = self._deletes[:]
        self._deletes.clear()
        counts = {key: float(count) for key, count in self._counts.items()}
        self._counts.clear()
        return OffloadingMetadata(
            stores, loads, overwrites, deletes, counts, self._changed_gauges()
        )

    @staticmethod
    def _message(loaded: _Loaded) -> LoadedBlock:
        name = None
        if loaded.file is not None:
            assert loaded.key is not None
            name = file_name(loaded.key, loaded.tail)
        return LoadedBlock(*loaded.place, loaded.host.block_id, name)

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
            self._broken |= reports.broken
            self._take_reports(reports)
        for request_id in output.finished_recving or ():
            self._end_load(request_id)

    def has_work(self) -> bool:
        """Whether transfers go on, or wait for a step to begin in."""
        return bool(self._stores or self._filling or self._waiting or self._deletes or self._loads)

    def reset(self) -> bool:
        """Forget everything; False, and nothing is forgotten, while a request is being loaded."""
        if self._loads:
            return False
        for contents in (self._filling, self._waiting, self._overwritten):
            contents.clear()
        self._sent.clear()
        self._leaving.clear()
        for store in self._stores.values():
            for stored in store.blocks:
                stored.valid = False
        for tier in (self._host, self._files):
            if tier is not None:
                tier.reset_prefix_cache(held_too=True)
        return True


class _Deleted:
    """Notes the files of blocks that the file tier forgets."""

    def __init__(self, deletes: list[tuple[int, str]]) -> None:
        self._deletes = deletes

    def cached(self, block: KVCacheBlock, key: BlockHashWithGroupId, tail: Tail | None) -> None:
        return

    def evicted(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self._deletes.append((block.group_id, file_name(block.block_hash, None)))
        for tail in block.tails:
            self._deletes.append((block.group_id, file_name(tail.key, tail)))

    def invalidated(self, block: KVCacheBlock) -> None:
        return
