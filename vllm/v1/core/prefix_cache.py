# SPDX-License-Identifier: Apache-2.0
"""The longest cached prefix every state group can continue from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Prefix(Protocol):
    """The tokens looked up, as hashes; a `Request` is one."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Of the full blocks."""
        ...

    @property
    def hash_block_size(self) -> int:
        """Tokens per block hash."""
        ...

    def prefix_parent(self, num_tokens: int) -> BlockHash:
        """Hash of the full blocks of the first `num_tokens` tokens."""
        ...

    def prefix_hash(self, num_tokens: int) -> BlockHash:
        """Hash of exactly the first `num_tokens` tokens."""
        ...


@dataclass(frozen=True)
class GroupHit:
    """A prefix one group can continue.

    `blocks` hold what it needs of the first `num_tokens` in full blocks, to be shared. `source`:
    the block that holds the rest (a partly filled block, a recurrent state), to be copied.
    """

    num_tokens: int
    blocks: list[KVCacheBlock]
    source: KVCacheBlock | None = None


class HitSource(Protocol):
    """A group, as the search sees it."""

    def find_longest_hit(self, prefix: Prefix, max_tokens: int) -> GroupHit:
        """The longest prefix of at most `max_tokens` tokens this group can continue.

        Must not change anything, and a smaller `max_tokens` must never give a longer hit.
        """
        ...


def reads_prefix_cache(request: Request) -> bool:
    """False if the client said so, or asks for prompt log-probabilities: they need every prompt
    position computed."""
    params = request.sampling_params
    return params is None or not (
        params.skip_reading_prefix_cache or params.prompt_logprobs is not None
    )


def find_common_hit(
    sources: Sequence[HitSource], prefix: Prefix, max_tokens: int
) -> tuple[int, list[GroupHit]]:
    """`(num_tokens, hit per group)` of the longest prefix all groups can continue.

    Each group may shorten what those before it offered; these are then asked again, until all
    offer the same.
    """
    limit = max_tokens if sources else 0
    while limit > 0:
        hits: list[GroupHit] = []
        for source in sources:
            hits.append(source.find_longest_hit(prefix, limit))
            limit = hits[-1].num_tokens
        if limit > 0 and all(hit.num_tokens == limit for hit in hits):
            return limit, hits
    return 0, [GroupHit(0, []) for _ in sources]
