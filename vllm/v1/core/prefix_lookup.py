# SPDX-License-Identifier: Apache-2.0
"""Looks a request's prefix up in every state group, and explains what was not found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.cache_options import CacheReport, GroupMatch, LossReason
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.prefix_cache import GroupHit, find_common_hit
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request


@dataclass(frozen=True)
class PrefixMatch:
    """`hits`: every group's part of the longest prefix all can continue, `num_tokens` long;
    `alone`: tokens each group could have continued by itself, `max_tokens` at most."""

    num_tokens: int
    max_tokens: int
    hits: list[GroupHit]
    alone: list[int]


class PrefixLookup:
    """Searches the groups of one pool."""

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager], pool: BlockPool) -> None:
        self._managers = managers
        self._pool = pool

    def search(self, request: Request) -> PrefixMatch:
        """The last token is never found: it must be computed to have logits."""
        limit = request.num_tokens - 1
        hits = [m.find_longest_hit(request, limit) for m in self._managers]
        alone = [hit.num_tokens for hit in hits]
        num_tokens = min(alone)
        if any(length != num_tokens for length in alone):
            num_tokens, hits = find_common_hit(self._managers, request, num_tokens)
        return PrefixMatch(num_tokens, limit, hits, alone)

    def diverged(self, match: PrefixMatch) -> int:
        """Tokens that all other groups could have continued, but no recurrent state; 0 if the
        recurrent groups did not limit the hit."""
        paged, recurrent = [match.max_tokens], [match.max_tokens]
        for manager, length in zip(self._managers, match.alone, strict=True):
            (recurrent if manager.is_recurrent else paged).append(length)
        return min(paged) if min(recurrent) < min(paged) else 0

    def report(self, request: Request, match: PrefixMatch | None) -> CacheReport:
        """The receipt; `match` is None if the request did not read the cache."""
        if match is None:
            groups = [GroupMatch(i, type(m.spec).__name__, 0) for i, m in enumerate(self._managers)]
            return CacheReport(request.num_tokens, 0, groups, reason="not_read")
        groups = [
            GroupMatch(i, type(m.spec).__name__, length)
            for i, (m, length) in enumerate(zip(self._managers, match.alone, strict=True))
        ]
        limiting, lost, reason = self._loss(request, match)
        return CacheReport(request.num_tokens, match.num_tokens, groups, limiting, lost, reason)

    def _loss(
        self, request: Request, match: PrefixMatch
    ) -> tuple[int | None, int, LossReason | None]:
        hit = match.num_tokens
        known = max(match.alone)
        evicted = min(self._evicted_run(request, hit), match.max_tokens)
        lost = max(known, evicted) - hit
        if lost <= 0:
            if not hit and request.cache_salt:
                return None, 0, "salt"
            return self._partial_block(request, match)
        limiting = min(range(len(match.alone)), key=match.alone.__getitem__)
        manager = self._managers[limiting]
        if manager.is_recurrent and known > hit:
            gone = self._pool.evicted_tail_between(request, hit, known, manager.group_id)
            return limiting, lost, "evicted" if gone else "no_checkpoint"
        if manager.num_ahead and known > hit:
            hashes, index = manager.keys(request).block_hashes, hit // manager.block_size
            gone = index < len(hashes) and self._pool.was_cached(hashes[index], manager.group_id)
            return limiting, lost, "evicted" if gone else "next_token"
        return limiting, lost, "evicted"

    def _evicted_run(self, request: Request, hit: int) -> int:
        """Tokens up to which every full block after the hit is cached or was evicted."""
        paged = [m for m in self._managers if not m.is_recurrent]
        if not paged:
            return hit
        ends = []
        for manager in paged:
            hashes, index = manager.keys(request).block_hashes, hit // manager.block_size
            while index < len(hashes) and self._pool.was_cached(hashes[index], manager.group_id):
                index += 1
            ends.append(index * manager.block_size)
        return max(hit, min(ends))

    def _partial_block(
        self, request: Request, match: PrefixMatch
    ) -> tuple[int | None, int, LossReason | None]:
        """The whole prompt was cached, but its last block may not be shared in part."""
        missed = match.max_tokens - match.num_tokens
        some = False
        for manager in self._managers:
            keys = manager.keys(request)
            hashes, index = keys.block_hashes, match.num_tokens // keys.hash_block_size
            if missed and index < len(hashes):
                some = True
                if self._pool.get_cached_block(hashes[index], manager.group_id) is None:
                    return None, 0, None
        return (0, missed, "partial_block") if some else (None, 0, None)


@dataclass(slots=True)
class _Found:
    """A look-up, the state of the cache and the known tokens it holds for, and its receipt."""

    request: Request
    match: PrefixMatch
    cache_version: int
    num_tokens: int
    report: CacheReport | None = None


class PrefixMatches:
    """The last look-up of every request that waits or has just been given blocks."""

    def __init__(self, managers: Sequence[SingleTypeKVCacheManager], pool: BlockPool) -> None:
        self._lookup = PrefixLookup(managers, pool)
        self._pool = pool
        self._found: dict[str, _Found] = {}

    def find(self, request: Request) -> PrefixMatch:
        """The longest cached prefix now."""
        version, num_tokens = self._pool.version, request.num_tokens
        found = self._found.get(request.request_id)
        if (
            found is None
            or found.request is not request
            or found.cache_version != version
            or found.num_tokens != num_tokens
            or found.report is not None
        ):
            found = _Found(request, self._lookup.search(request), version, num_tokens)
            self._found[request.request_id] = found
        return found.match

    def settle(self, request: Request) -> None:
        """The request is about to be given blocks: its receipt is made now, since afterwards its
        own tokens are in the cache."""
        found = self._found.get(request.request_id)
        if found is not None and found.report is None:
            found.report = self._lookup.report(request, found.match)

    def diverged(self, request_id: str) -> int:
        """See `PrefixLookup.diverged`; 0 without a look-up."""
        found = self._found.get(request_id)
        return self._lookup.diverged(found.match) if found is not None else 0

    def discard(self, request_id: str) -> None:
        """What the last look-up found is not used."""
        self._found.pop(request_id, None)

    def take_report(self, request: Request) -> CacheReport:
        """The receipt of the last look-up; of a request that made none, if there was none."""
        found = self._found.pop(request.request_id, None)
        if found is None:
            return self._lookup.report(request, None)
        return found.report or self._lookup.report(request, found.match)
