# SPDX-License-Identifier: Apache-2.0
"""Turns what happens to cached blocks into KV events; a `BlockPool` has one only if asked to."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.distributed.kv_events.messages import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    get_block_hash,
    maybe_convert_block_hash,
    need_extra_keys,
)
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request


class BlockEvents:
    """Events since the last `take`; `specs`: of every group.

    The pool knows hashes only, so `request` must be set, before anything is stored, to one whose
    tokens they stand for.
    """

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self.request: Request | None = None
        self._specs = specs
        self._events: list[KVCacheEvent] = []
        self._next_index = 0

    def take(self) -> list[KVCacheEvent]:
        """Events in the order in which things happened."""
        events, self._events = self._events, []
        self.request = None
        return events

    def stored(self, group_id: int, block_hash: BlockHash) -> None:
        """A full block of the request's tokens can be found."""
        if self._is_untold(group_id):
            return
        assert self.request is not None
        spec, hashed = self._specs[group_id], self.request.hash_block_size
        size = hashed if spec.is_recurrent else spec.block_size
        end = (self._index_of(block_hash) + 1) * hashed
        self._store(group_id, block_hash, end - size, end)

    def stored_tail(self, group_id: int, key: BlockHash, parent: BlockHash, length: int) -> None:
        """The prefix `key` can be continued: `length` tokens after the full blocks of `parent`.

        With no such token it ends like the full block `parent`, and is told like one.
        """
        if not length:
            return self.stored(group_id, parent)
        if self._is_untold(group_id):
            return
        assert self.request is not None
        at_start = parent not in self.request.block_hashes
        start = 0 if at_start else (self._index_of(parent) + 1) * self.request.hash_block_size
        self._store(group_id, key, start, start + length)

    def removed(self, block: KVCacheBlock) -> None:
        """Nothing of this block can be found any more."""
        if self._is_untold(block.group_id):
            return
        keys = [tail.key for tail in block.tails]
        if block.block_hash is not None:
            keys.append(block.block_hash)
        hashes = [maybe_convert_block_hash(get_block_hash(key)) for key in keys]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == block.group_id:
            last.block_hashes += hashes
        else:
            self._events.append(BlockRemoved(hashes, MEDIUM_GPU, block.group_id))

    def cleared(self) -> None:
        """The cache is empty; what happened before does not matter any more."""
        self._events = [AllBlocksCleared()]

    def _is_untold(self, group_id: int) -> bool:
        """Of a drafter's rows, whose hashes cover more tokens than the blocks hold."""
        return self._specs[group_id].num_lookahead_tokens > 0

    def _index_of(self, block_hash: BlockHash) -> int:
        """Which of the request's full blocks this is; they mostly come in order."""
        assert self.request is not None
        hashes, index = self.request.block_hashes, self._next_index
        if index >= len(hashes) or hashes[index] != block_hash:
            index = hashes.index(block_hash)
        self._next_index = index + 1
        return index

    def _store(self, group_id: int, block_hash: BlockHash, start: int, end: int) -> None:
        request, spec = self.request, self._specs[group_id]
        assert request is not None
        index = start // request.hash_block_size
        parent = maybe_convert_block_hash(request.block_hashes[index - 1]) if index else None
        tokens = request.all_token_ids[start:end]
        keys = None
        if need_extra_keys(request):
            keys = [generate_block_hash_extra_keys(request, start, end)[0]]
        external = maybe_convert_block_hash(block_hash)
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and (last.group_idx, last.block_size) == (group_id, end - start)
            and parent == last.block_hashes[-1]
            and (keys is None) == (last.extra_keys is None)
        ):
            last.block_hashes.append(external)
            last.token_ids += tokens
            if keys is not None and last.extra_keys is not None:
                last.extra_keys += keys
            return
        lora = request.lora_request
        self._events.append(
            BlockStored(
                [external],
                parent,
                tokens,
                end - start,
                lora.lora_int_id if lora is not None else None,
                MEDIUM_GPU,
                lora.lora_name if lora is not None else None,
                keys,
                group_id,
                spec.kind,
                spec.window,
            )
        )
