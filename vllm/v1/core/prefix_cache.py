# SPDX-License-Identifier: Apache-2.0
"""The longest cached prefix every state group can continue from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, overload

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request


class Prefix(Protocol):
    """The tokens looked up, as hashes; a `Request` is one."""

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        ...

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


class GroupPrefix:
    """`prefix` for a group whose blocks take `block_size` tokens, a multiple of the hashed ones,
    and whose rows depend on `num_ahead` tokens after their own.

    A block has the hash of the prefix that it ends, those tokens included: what is named is
    content, and the content of a block or tail is equal only if they are as well.
    """

    def __init__(self, prefix: Prefix, block_size: int, num_ahead: int = 0) -> None:
        self._prefix, self._num_ahead = prefix, num_ahead
        self.hash_block_size = block_size

    @property
    def num_tokens(self) -> int:
        """Tokens whose rows can be named."""
        return self._prefix.num_tokens - self._num_ahead

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        return _BlockHashes(self)

    def prefix_parent(self, num_tokens: int) -> BlockHash:
        return self._prefix.prefix_parent(num_tokens - num_tokens % self.hash_block_size)

    def prefix_hash(self, num_tokens: int) -> BlockHash:
        return self._prefix.prefix_hash(num_tokens + self._num_ahead)


class _BlockHashes(Sequence[BlockHash]):
    """Made when they are asked for: most are read once, or never."""

    def __init__(self, prefix: GroupPrefix) -> None:
        self._prefix = prefix

    def __len__(self) -> int:
        return max(self._prefix.num_tokens, 0) // self._prefix.hash_block_size

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._prefix.prefix_hash((index + 1) * self._prefix.hash_block_size)


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
