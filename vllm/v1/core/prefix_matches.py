# SPDX-License-Identifier: Apache-2.0
"""What waiting requests find in the prefix cache: looked up once, and again after it changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.cache_options import CacheReport
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.prefix_lookup import PrefixLookup, PrefixMatch
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request


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
