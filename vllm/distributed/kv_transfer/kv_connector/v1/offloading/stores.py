# SPDX-License-Identifier: Apache-2.0
"""What leaves the device when.

Stores follow the device's prefix cache: whatever it can find is copied once, at the beginning of
the step after the one that completed it, before anything of that step is written. Nothing on the
device is held for that: a block that is reused meanwhile makes the step wait for the copy, in
stream order. What host memory has no room for waits on the device.
"""

from collections import Counter
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import FileNames
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import (
    JobReport,
    MovedBlock,
    OffloadingWorkerMetadata,
    StoreJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.tiers import Tier
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, Tail

#: group and block on the device
Place = tuple[int, int]


@dataclass(slots=True)
class _Content:
    """What a device block holds under `key`."""

    key: BlockHashWithGroupId
    tail: Tail | None


@dataclass(slots=True)
class _Stored:
    """A block of a store job. `file`: its place in the file tier, if it goes there, and `name` what
    it is called there. `valid`: it holds what its key says."""

    place: Place
    key: BlockHashWithGroupId
    tail: Tail | None
    host: KVCacheBlock
    file: KVCacheBlock | None
    name: str | None
    valid: bool = True


@dataclass
class _Store:
    """A job in flight, until every rank has reported it from host memory and from files."""

    blocks: list[_Stored]
    copied: JobReport = JobReport(0)
    written: JobReport = JobReport(0)


class StoreScheduling:
    """Decides stores of `num_ranks` workers; observes the device's block pool.

    Appends to `deletes` the names of files that turned out wrong; counts in `counts`.
    """

    def __init__(
        self,
        host: Tier,
        files: Tier | None,
        num_ranks: int,
        names: FileNames,
        deletes: list[str],
        counts: Counter[str],
    ) -> None:
        self._host, self._files, self._names = host, files, names
        self._num_ranks = num_ranks
        self._deletes, self._counts = deletes, counts
        #: what the step being scheduled fills: complete when it was sent
        self._filling: dict[Place, list[_Content]] = {}
        #: what is complete and in no tier yet, the oldest first: it leaves as host memory has room
        self._waiting: dict[Place, list[_Content]] = {}
        #: complete content of blocks that the step being scheduled overwrites: leaves now or never
        self._overwritten: dict[Place, list[_Content]] = {}
        #: found in host memory, which has not been told yet
        self._known: list[KVCacheBlock] = []
        #: keys of what came from the host, which has it still
        self._loaded: set[BlockHashWithGroupId] = set()
        #: keys on their way to the host
        self._leaving: set[BlockHashWithGroupId] = set()
        #: device blocks whose content was sent to the host since they got it: key by key
        self._sent: dict[Place, list[BlockHashWithGroupId]] = {}
        #: device blocks that are being copied out
        self._read: Counter[Place] = Counter()
        self._stores: dict[int, _Store] = {}
        #: the last store that writes the file of this name
        self._writing: dict[str, _Stored] = {}
        self._num_stores = 0
        self._overwrites = False

    @property
    def has_work(self) -> bool:
        """Whether stores go on, or wait for a step to begin in."""
        return bool(self._stores or self._filling or self._waiting)

    # ---- what the device's cache holds ---------------------------------------------------------

    def cached(self, block: KVCacheBlock, key: BlockHashWithGroupId, tail: Tail | None) -> None:
        if key in self._loaded:
            return
        place = block.group_id, block.block_id
        contents = self._filling if tail is None else self._waiting
        contents.setdefault(place, []).append(_Content(key, tail))

    def note_loaded(self, keys: set[BlockHashWithGroupId]) -> None:
        """The device has got these back, and its cache finds them in the step that is scheduled
        next, or later."""
        self._loaded |= keys

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

    # ---- around a step -------------------------------------------------------------------------

    def take_job(self) -> StoreJob | None:
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
        self._loaded.clear()
        self._refresh_known()
        if not blocks:
            return None
        self._num_stores += 1
        self._stores[self._num_stores] = _Store(blocks)
        sent = [MovedBlock(*stored.place, stored.host.block_id, stored.name) for stored in blocks]
        return StoreJob(self._num_stores, sent)

    def _refresh_known(self) -> None:
        if self._known:
            self._host.refresh(self._known)
            self._known = []

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
                self._known.append(known)
                continue
            self._refresh_known()  # so that none of them gives way to this one
            host = self._host.take(key)
            if host is None:
                return contents[i:]
            file = name = None
            if self._files is not None and self._files.block_of(key) is None:
                file = self._files.take(key)
            if file is not None:
                name = self._names.of(key, content.tail)
            self._leaving.add(key)
            self._sent.setdefault(place, []).append(key)
            self._read[place] += 1
            blocks.append(stored := _Stored(place, key, content.tail, host, file, name))
            if name is not None:
                self._writing[name] = stored
        return []

    def take_reports(self, reports: OffloadingWorkerMetadata) -> None:
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
            if stored.file is None or stored.name is None:
                continue
            is_last = self._writing.get(stored.name) is stored
            if is_last:
                del self._writing[stored.name]
            if stored.valid and i not in store.written.failed:
                self._files.publish(stored.file, stored.key, stored.tail)
            elif is_last:  # or else a later store has written other content, or will
                self._deletes.append(stored.name)
            self._files.free_blocks([stored.file])
            self._release(stored)

    def _release(self, stored: _Stored) -> None:
        self._host.free_blocks([stored.host])
        if stored.valid:
            self._leaving.discard(stored.key)

    def take_overwrites(self) -> bool:
        """Whether the step being scheduled overwrites what may still have to be copied."""
        overwrites, self._overwrites = self._overwrites, False
        return overwrites

    def reset(self) -> None:
        """Forget everything; what is being copied is worth nothing when it arrives."""
        for contents in (self._filling, self._waiting, self._overwritten):
            contents.clear()
        self._loaded.clear()
        self._sent.clear()
        self._leaving.clear()
        for store in self._stores.values():
            for stored in store.blocks:
                stored.valid = False
