# SPDX-License-Identifier: Apache-2.0
"""Blocks, their content hashes, and (re-exported) grouping and sizing of state memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, NewType, Protocol

from vllm.utils.hashing import HashFunction
from vllm.v1.core.arena_sizing import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_capacity,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    get_max_concurrency_for_kv_cache_config,
    pages_per_request,
)
from vllm.v1.core.state_groups import (
    create_kv_cache_group_specs,
    get_kv_cache_groups,
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
)

__all__ = [
    "NONE_HASH",
    "BlockHash",
    "BlockHashWithGroupId",
    "BlockHasher",
    "ExternalBlockHash",
    "KVCacheBlock",
    "Tail",
    "check_enough_kv_cache_memory",
    "create_kv_cache_group_specs",
    "estimate_max_model_len",
    "generate_block_hash_extra_keys",
    "get_block_hash",
    "get_group_id",
    "get_kv_cache_capacity",
    "get_kv_cache_config_from_groups",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "get_max_concurrency_for_kv_cache_config",
    "get_request_block_hasher",
    "hash_block_tokens",
    "init_none_hash",
    "is_kv_cache_spec_uniform",
    "make_block_hash_with_group_id",
    "maybe_convert_block_hash",
    "need_extra_keys",
    "pages_per_request",
    "unify_hybrid_kv_cache_specs",
]

#: Hash of a full block: of its parent's hash, its tokens and its extra keys.
BlockHash = NewType("BlockHash", bytes)
#: A block hash followed by the group id, 4 bytes big-endian.
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
#: As connectors see it: the bytes, or their low 64 bits.
ExternalBlockHash = bytes | int

#: Parent of every first block. Random, so that hashes cannot be prepared from outside, unless
#: PYTHONHASHSEED is set, so that several engines agree.
NONE_HASH: BlockHash = BlockHash(os.urandom(32))


def init_none_hash(hash_fn: HashFunction, root: bytes | None = None) -> None:
    """Set `NONE_HASH` for a new engine, to `root` if given; hashers of earlier ones keep theirs."""
    global NONE_HASH
    seed = os.environ.get("PYTHONHASHSEED")
    own = os.urandom(32) if seed is None else hash_fn(seed)
    NONE_HASH = BlockHash(own if root is None else root)


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    return BlockHashWithGroupId(block_hash + group_id.to_bytes(4, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    return BlockHash(key[:-4])


def get_group_id(key: BlockHashWithGroupId) -> int:
    return int.from_bytes(key[-4:], "big")


def maybe_convert_block_hash(block_hash: BlockHash) -> ExternalBlockHash:
    """The hash as connectors exchange it: low 64 bits as an integer if
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 1 (the default), else the bytes."""
    if os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") == "1":
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash


class Tail(NamedTuple):
    """A token count inside a block at which the prefix cache can continue.

    `key`: hash of all tokens up to it; `parent`: hash of the full blocks before the block;
    `length`: tokens of the block that count (0 for a recurrent state at a block boundary).
    """

    key: BlockHashWithGroupId
    parent: BlockHashWithGroupId
    length: int


class KVCacheBlock:
    """One block of one group: who uses it and what it holds.

    `ref_cnt`: requests holding it. `block_hash`: set while the prefix cache can find it as a full
    block, `tails`: the counts inside it at which it can be continued from a copy. A block with no
    references and any of these is idle: it can be hit and can be evicted, the lowest `rank` first.
    `page`: index of its page in the arena.
    """

    __slots__ = (
        "block_id",
        "group_id",
        "page",
        "ref_cnt",
        "block_hash",
        "tails",
        "credit",
        "rank",
        "is_null",
    )

    def __init__(
        self, block_id: int, group_id: int = 0, page: int = 0, is_null: bool = False
    ) -> None:
        self.block_id = block_id
        self.group_id = group_id
        self.page = page
        self.ref_cnt = 0
        self.block_hash: BlockHashWithGroupId | None = None
        self.tails: tuple[Tail, ...] = ()
        self.credit = 1.0
        self.rank = (0.0, 0)
        self.is_null = is_null

    @property
    def is_cached(self) -> bool:
        """Whether the prefix cache can find anything in it."""
        return self.block_hash is not None or bool(self.tails)

    def reset_hash(self) -> None:
        self.block_hash = None
        self.tails = ()
        self.credit = 1.0

    def __repr__(self) -> str:
        return f"KVCacheBlock(id={self.block_id}, group={self.group_id}, refs={self.ref_cnt})"


class HashedRequest(Protocol):
    """What of a `Request` the hashes of its blocks depend on."""

    cache_salt: str | None
    lora_request: Any | None
    mm_features: list[Any]

    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def block_hashes(self) -> list[BlockHash]: ...


def need_extra_keys(request: HashedRequest) -> bool:
    """Whether more than the tokens decides the content of this request's blocks."""
    return bool(request.lora_request or request.mm_features or request.cache_salt)


def generate_block_hash_extra_keys(
    request: HashedRequest, start: int, end: int, start_mm_idx: int = 0
) -> tuple[tuple[Any, ...] | None, int]:
    """What besides tokens decides the content of tokens `[start, end)`.

    In order: the adapter's name, `(identifier, offset - start)` of every media item in the range,
    the cache salt (first block only). `start_mm_idx`: first media item that can reach the range;
    returned for the next block. None when there is nothing.
    """
    keys: list[Any] = []
    if request.lora_request is not None:
        keys.append(request.lora_request.lora_name)
    index = start_mm_idx
    for feature in request.mm_features[start_mm_idx:]:
        position = feature.mm_position
        if position.offset >= end:
            break
        if position.offset + position.length > start:
            keys.append((feature.identifier, position.offset - start))
        if position.offset + position.length > end:
            break
        index += 1
    if start == 0 and request.cache_salt:
        keys.append(request.cache_salt)
    return (tuple(keys) if keys else None), index


def hash_block_tokens(
    hash_fn: HashFunction,
    parent: BlockHash | None,
    tokens: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHash:
    """`hash_fn((parent or NONE_HASH, tokens, extra_keys))`: equal only for equal prefixes."""
    return BlockHash(hash_fn((parent or NONE_HASH, tuple(tokens), extra_keys)))


class BlockHasher:
    """Hashes of a request's prefixes, in blocks of `block_size` tokens.

    Called with a request, it gives the hashes of its full blocks not hashed yet: it reads
    `request.block_hashes` for what is done and only known tokens; the caller appends the result.
    The parent of first blocks stays what `NONE_HASH` was when the hasher was made: another engine
    in the process sets that anew. `root` replaces it.
    """

    def __init__(
        self, block_size: int, hash_fn: HashFunction, root: BlockHash | None = None
    ) -> None:
        self.block_size = block_size
        self._hash_fn = hash_fn
        self._root = NONE_HASH if root is None else root

    def __call__(self, request: HashedRequest) -> list[BlockHash]:
        size, hashes, tokens = self.block_size, request.block_hashes, request.all_token_ids
        start = len(hashes) * size
        if start + size > len(tokens):
            return []
        parent = hashes[-1] if hashes else self._root
        extra = need_extra_keys(request)
        new: list[BlockHash] = []
        mm_index = 0
        for first in range(start, len(tokens) - size + 1, size):
            keys = None
            if extra:
                keys, mm_index = generate_block_hash_extra_keys(
                    request, first, first + size, mm_index
                )
            parent = hash_block_tokens(self._hash_fn, parent, tokens[first : first + size], keys)
            new.append(parent)
        return new

    def parent(self, request: HashedRequest, num_tokens: int) -> BlockHash:
        """Hash of the full blocks of the first `num_tokens` tokens."""
        num_blocks = num_tokens // self.block_size
        return request.block_hashes[num_blocks - 1] if num_blocks else self._root

    def prefix(self, request: HashedRequest, num_tokens: int) -> BlockHash:
        """Hash of exactly the first `num_tokens` tokens, which must be known."""
        start = num_tokens - num_tokens % self.block_size
        parent = self.parent(request, num_tokens)
        if start == num_tokens:
            return parent
        keys = None
        if need_extra_keys(request):
            keys, _ = generate_block_hash_extra_keys(request, start, num_tokens)
        return hash_block_tokens(
            self._hash_fn, parent, request.all_token_ids[start:num_tokens], keys
        )


def get_request_block_hasher(
    block_size: int, hash_fn: HashFunction, root: BlockHash | None = None
) -> BlockHasher:
    return BlockHasher(block_size, hash_fn, root)
