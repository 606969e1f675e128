# SPDX-License-Identifier: Apache-2.0
"""A model whose state is known: every value in it says which tokens it was computed from.

Token `p` of a sequence has a mark, a number that follows from tokens `0..p`. Paged layers keep the
mark of every token that completes a row in all elements of the row, recurrent ones the mark of the
newest token. The next token follows from the newest mark. So any byte that was not computed for
exactly these tokens is found, and by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vllm.v1.kv_cache_interface import KVCacheGroupSpec

#: fp32 holds the marks of so many ranks exactly
_MARKS = 2**22
MAX_RANKS = 4


def marks_of(token_ids: Sequence[int]) -> list[int]:
    """The mark of every token."""
    marks, mark = [], 1
    for token in token_ids:
        mark = zlib.crc32(f"{mark} {token}".encode()) % _MARKS
        marks.append(mark)
    return marks


def next_token(mark: int) -> int:
    """What greedy sampling gives; never the end of the text (255)."""
    return (mark * 7919 + 13) % 251


class GroupState:
    """One group's layers: `caches[layer]`, a tensor `[num_blocks, ...]` or a tuple of them. Each
    rank has marks of its own."""

    def __init__(
        self,
        group: KVCacheGroupSpec,
        caches: dict[str, Tensor | tuple[Tensor, ...]],
        rank: int = 0,
    ) -> None:
        self.spec = group.kv_cache_spec
        self._first_mark = rank * _MARKS
        self._caches = [caches[name] for name in group.layer_names]

    def write(self, blocks: Sequence[int], start: int, marks: Sequence[int]) -> None:
        """Tokens `start` and on have these marks; `blocks` is the request's list."""
        if self.spec.is_recurrent:
            for layer, tensor in self._states():
                tensor[blocks[0]] = self._value(marks[-1], layer)
            return
        positions = self._ends_of_rows(start, start + len(marks))
        completed = [marks[position - start] for position in positions]
        where = self._where(blocks, positions)
        for cache, expected in self._rows(completed):
            cache[where] = expected

    def first_wrong(
        self, blocks: Sequence[int], marks: Sequence[int], num_tokens: int
    ) -> int | None:
        """The first of `num_tokens` computed tokens whose state is needed and is not what it should
        be."""
        if not num_tokens:
            return None
        if self.spec.is_recurrent:
            wrong = any(
                bool((tensor[blocks[0]] != self._value(marks[num_tokens - 1], layer)).any())
                for layer, tensor in self._states()
            )
            return num_tokens - 1 if wrong else None
        window = self.spec.window
        first = 0 if window is None else max(0, num_tokens - window + 1)
        positions = self._ends_of_rows(first, num_tokens)
        where = self._where(blocks, positions)
        differs = torch.zeros(len(positions), dtype=torch.bool)
        for cache, expected in self._rows([marks[position] for position in positions]):
            differs |= (cache[where] != expected).flatten(1).any(1)
        found = differs.nonzero()
        return positions[int(found[0])] if len(found) else None

    def _value(self, mark: int, layer: int) -> float:
        return float(self._first_mark + mark + layer)

    def _ends_of_rows(self, start: int, end: int) -> list[int]:
        """Those tokens of `start..end-1` that complete a row."""
        per_row = self.spec.tokens_per_row
        return list(range(start + (-start - 1) % per_row, end, per_row))

    def _where(self, blocks: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Block and row within it of the rows that tokens complete."""
        size, per_row = self.spec.block_size, self.spec.tokens_per_row
        numbers = [(blocks[p // size], p % size // per_row) for p in positions]
        block, row = torch.tensor(numbers, dtype=torch.long).view(-1, 2).T
        return block, row

    def _rows(self, marks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Of every layer the memory, `[num_blocks, rows, ...]`, and what rows of these marks hold,
        `[marks, 1...]`."""
        token_dim = self.spec.views[0].token_dim
        assert token_dim is not None
        for layer, cache in enumerate(self.tensors()):
            values = torch.tensor([self._value(m, layer) for m in marks], dtype=cache.dtype)
            yield cache.movedim(token_dim + 1, 1), values.view(-1, *[1] * (cache.dim() - 2))

    def _states(self) -> list[tuple[int, Tensor]]:
        return [
            (layer, tensor)
            for layer, cache in enumerate(self._caches)
            for tensor in (cache if isinstance(cache, tuple) else (cache,))
        ]

    def tensors(self) -> list[Tensor]:
        """One tensor per layer that is handed to the connector's layer calls."""
        return [cache for cache in self._caches if isinstance(cache, Tensor)]
