# SPDX-License-Identifier: Apache-2.0
"""A prompt's blocks as keys of the table that says which replica has seen them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher
from vllm.v1.engine import EngineCoreRequest

#: blocks of a prompt that are looked at: prompts that agree so far seldom differ in the next ones
_MOST_BLOCKS = 2048
_KEY_BYTES = 8
_MASK = (1 << 64) - 1


@dataclass
class _Prompt:
    """What `BlockHasher` reads of a request."""

    all_token_ids: list[int]
    cache_salt: str | None
    lora_request: Any | None = None
    mm_features: list[Any] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)


class PromptChains:
    """Chained as the prefix cache chains its hashes, of the same blocks with the same extra keys;
    but 64 bits wide and quick to make: a collision costs a replica's hit and nothing else. The same
    in all processes."""

    def __init__(self, block_size: int, is_cached: bool = True) -> None:
        self.block_size = block_size
        self._is_cached = is_cached
        self._hasher = get_request_block_hasher(block_size, _fingerprint, BlockHash(b"\x01"))

    def of(self, request: EngineCoreRequest) -> np.ndarray:
        """Keys of the prompt's full blocks, uint64 `[blocks]`; none without a prefix cache."""
        if not self._is_cached:
            return np.zeros(0, np.uint64)
        tokens = request.prompt_token_ids[: _MOST_BLOCKS * self.block_size]
        prompt = _Prompt(tokens, request.cache_salt)
        return np.frombuffer(b"".join(self._hasher(prompt)), np.uint64)


def _fingerprint(value: Any) -> bytes:
    """Of `(parent, tokens, extra keys)`. Python's hash of integers, unlike that of text, is the
    same in all processes; 0 is left out."""
    parent, tokens, extra = value
    numbers = (int.from_bytes(parent, "little"), *tokens)
    if extra is not None:
        numbers = (*numbers, int.from_bytes(sha256(extra)[:_KEY_BYTES], "little"))
    return ((hash(numbers) & _MASK) or 1).to_bytes(_KEY_BYTES, "little")
