# SPDX-License-Identifier: Apache-2.0
"""What a waiting request gets back from host memory and files."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.eviction import content_of
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.files import FileNames
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.messages import LoadJob, MovedBlock
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.tiers import Tier, TierSearch
from vllm.v1.core.kv_cache_blocks import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, Tail
from vllm.v1.core.prefix_cache import reads_prefix_cache
from vllm.v1.core.prefix_lookup import PrefixMatch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request


@dataclass(slots=True)
class _Loaded:
    """A block of a load. `file`: where `host` is filled from, if it has to be."""

    moved: MovedBlock
    host: KVCacheBlock
    file: KVCacheBlock | None
    key: BlockHashWithGroupId | None
    tail: Tail | None


@dataclass
class _Found:
    """A look-up, and the tiers' versions and known tokens it holds for."""

    versions: tuple[int, ...]
    num_tokens: int
    match: PrefixMatch


class LoadScheduling:
    """Looks prefixes up and decides loads; counts in `counts`."""

    def __init__(
        self,
        config: KVCacheConfig,
        host: Tier,
        files: Tier | None,
        names: FileNames,
        counts: Counter[str],
    ) -> None:
        self._host, self._files, self._names = host, files, names
        self._counts = counts
        self._search = TierSearch(config, host, files)
        self._block_sizes = [g.kv_cache_spec.block_size for g in config.kv_cache_groups]
        self._recurrent = [g.kv_cache_spec.is_recurrent for g in config.kv_cache_groups]
        self._matches: dict[str, _Found] = {}
        self._loads: dict[str, list[_Loaded]] = {}
        self._new: list[str] = []
        #: requests whose loads began before everything was forgotten
        self._doomed: set[str] = set()
        #: group and block of host memory whose content arrived broken
        self._broken: set[tuple[int, int]] = set()

    @property
    def has_work(self) -> bool:
        """Whether a request is being loaded."""
        return bool(self._loads)

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
        if self._files is None:
            return True
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

    def begin(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request got blocks: bring `num_external_tokens` of its prefix there, if any."""
        found = self._matches.pop(request.request_id, None)
        if found is None:
            return
        match = found.match
        self._counts["query_tokens"] += request.num_tokens - 1
        self._counts["hit_tokens"] += num_external_tokens
        wanted = self._wanted(match, blocks, num_external_tokens) if num_external_tokens else []
        # Held before any slot is taken, which could evict them.
        for tier, read in self._by_tier(block for _, _, block in wanted):
            tier.touch(read)
        used = [b for hit in match.hits for b in (*hit.blocks, hit.source) if b is not None]
        for tier, found_there in self._by_tier(b for b in used if not b.is_null):
            tier.refresh(found_there)
        if wanted:
            self._loads[request.request_id] = [self._to_load(*one) for one in wanted]
            self._new.append(request.request_id)

    def _wanted(
        self, match: PrefixMatch, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> list[tuple[int, int, KVCacheBlock]]:
        """Group, block on the device, and the tiers' block that fills it, of the last
        `num_external_tokens` of the match."""
        start = match.num_tokens - num_external_tokens
        ids = blocks.get_block_ids()
        wanted: list[tuple[int, int, KVCacheBlock]] = []
        for group, hit in enumerate(match.hits):
            size = self._block_sizes[group]
            for i in range(start // size, len(hit.blocks)):
                if not hit.blocks[i].is_null:
                    wanted.append((group, ids[group][i], hit.blocks[i]))
            if hit.source is not None:
                last = 0 if self._recurrent[group] else match.num_tokens // size
                wanted.append((group, ids[group][last], hit.source))
        return wanted

    @property
    def _file_tier(self) -> Tier:
        assert self._files is not None
        return self._files

    def _in_host(self, block: KVCacheBlock) -> bool:
        """Or else in files."""
        return self._files is None or self._host.owns(block)

    def _by_tier(self, blocks: Iterable[KVCacheBlock]) -> Iterator[tuple[Tier, list[KVCacheBlock]]]:
        """Each tier that has some of the blocks, with these in their order."""
        in_host: list[KVCacheBlock] = []
        in_files: list[KVCacheBlock] = []
        for block in blocks:
            (in_host if self._in_host(block) else in_files).append(block)
        yield self._host, in_host
        if in_files:
            yield self._file_tier, in_files

    def _to_load(self, group: int, device_block: int, block: KVCacheBlock) -> _Loaded:
        if self._in_host(block):
            moved = MovedBlock(group, device_block, block.block_id, None)
            return _Loaded(moved, block, None, None, None)
        key, tail = content_of(block)
        host = self._host.take(key)
        assert host is not None, "room for it was checked"
        moved = MovedBlock(group, device_block, host.block_id, self._names.of(key, tail))
        return _Loaded(moved, host, block, key, tail)

    def end(self, request_id: str) -> set[BlockHashWithGroupId]:
        """Let go of what was read; broken content goes, what came from files stays in the host.

        Names of full blocks that the device and host memory have now.
        """
        loads = self._loads.pop(request_id, ())
        doomed = request_id in self._doomed
        self._doomed.discard(request_id)
        for loaded in loads:
            if self._broken or loaded.file is not None:
                self._settle(loaded, doomed)
        hosts = [loaded.host for loaded in loads]
        self._host.free_blocks(hosts)
        return {host.block_hash for host in hosts if host.block_hash is not None}

    def reset(self) -> None:
        """Both tiers forget everything: what is being loaded stays in neither."""
        self._doomed.update(self._loads)
        self._matches.clear()

    def _settle(self, loaded: _Loaded, doomed: bool) -> None:
        """See `end`; the host's block is still held."""
        host, file = loaded.host, loaded.file
        slot = host.group_id, host.block_id
        if broken := slot in self._broken:
            self._broken.remove(slot)
        if file is not None:
            if broken:
                self._file_tier.uncache_block(file)
            elif not doomed:
                assert loaded.key is not None
                self._host.publish(host, loaded.key, loaded.tail)
            self._file_tier.free_blocks([file])
        elif broken:
            self._host.uncache_block(host)

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._matches.pop(request_id, None)

    def take_jobs(self) -> list[LoadJob]:
        """The step's loads."""
        jobs = [
            LoadJob(request_id, [loaded.moved for loaded in self._loads[request_id]])
            for request_id in self._new
        ]
        self._new.clear()
        return jobs

    def note_broken(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Blocks of host memory that are not what was sealed, of loads that are about to end."""
        self._broken.update(blocks)
