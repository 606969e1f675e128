# SPDX-License-Identifier: Apache-2.0
"""Cached rows to host memory, without stopping the device."""

from math import prod
from typing import Protocol

import torch
from torch import Tensor

from vllm.hidden_states_storage import RowFormat, StorageDtype, StoredRows

#: device memory for rows on their way to the host
_STAGING_BYTES = 32 * 2**20


class CopyEvent(Protocol):
    """When a copy is complete; `torch.cuda.Event` is one."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CompletedCopy:
    """A copy that was complete when it was made."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def extract_from_kv_cache(kv_cache: Tensor, slot_mapping: Tensor, num_tokens: int) -> Tensor:
    """Rows of the first `num_tokens` slots: `[num_tokens, columns, hidden]`.

    `kv_cache [num_blocks, block_size, columns, hidden]` (any block stride), `slot_mapping` int64.
    """
    slots = slot_mapping[:num_tokens]
    block_size = kv_cache.shape[1]
    return kv_cache[slots // block_size, slots % block_size]


class RowCopier:
    """Copies requests' rows out of one `cache [num_blocks, block_size, columns, hidden]`.

    On CUDA the copy runs on a stream of its own, after the work queued so far. Rows that are stored
    in another format are converted on the device, so that only what is stored travels.
    """

    def __init__(self, cache: Tensor, storage: StorageDtype = "auto") -> None:
        self._storage = storage
        self.use(cache)
        self.format = RowFormat(cache.shape[2], cache.shape[3], cache.dtype, storage)
        self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None

    def use(self, cache: Tensor) -> None:
        """From here on copy out of this one, whose rows are as before; no copy is under way."""
        self._cache = cache
        self._block_size = cache.shape[1]
        # Eight bits are made by way of fp32.
        itemsize = cache.itemsize + (0 if self._storage == "auto" else torch.float32.itemsize)
        block_bytes = prod(cache.shape[1:]) * itemsize
        self._blocks_per_chunk = max(1, _STAGING_BYTES // block_bytes)

    def leave(self) -> None:
        """Let go of the cache until `use`; no copy is under way."""
        self._cache = self._cache.new_empty(0, *self._cache.shape[1:])

    def copy(self, block_ids: list[int], num_tokens: int) -> tuple[StoredRows, CopyEvent]:
        """`num_tokens` rows in host memory, valid once the event is complete.

        ValueError when the blocks hold fewer rows than that.
        """
        num_blocks = -(-num_tokens // self._block_size)
        if len(block_ids) < num_blocks:
            raise ValueError(
                f"{num_tokens} rows need {num_blocks} blocks of {self._block_size}, "
                f"got {len(block_ids)}"
            )
        if self._stream is None:
            ids = torch.tensor(block_ids[:num_blocks], dtype=torch.int64)
            rows = torch.index_select(self._cache, 0, ids).flatten(0, 1)[:num_tokens]
            return self.format.store(rows), CompletedCopy()
        return self._copy_from_device(block_ids[:num_blocks], num_tokens, self._stream)

    def _copy_from_device(
        self, block_ids: list[int], num_tokens: int, stream: torch.cuda.Stream
    ) -> tuple[StoredRows, CopyEvent]:
        host = self.format.empty(num_tokens, pin_memory=True)
        host_ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(stream):
            ids = host_ids.to(self._cache.device, non_blocking=True)
            for first in range(0, len(block_ids), self._blocks_per_chunk):
                chunk = ids[first : first + self._blocks_per_chunk]
                row = first * self._block_size
                rows = torch.index_select(self._cache, 0, chunk).flatten(0, 1)
                stored = self.format.store(rows[: num_tokens - row])
                for name, part in stored.tensors.items():
                    target = host.tensors[name][row : row + part.shape[0]]
                    target.copy_(part, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return host, event
