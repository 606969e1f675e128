# SPDX-License-Identifier: Apache-2.0
"""What all front ends of one server know of its replicas: numbers in memory that they share."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

#: entries of the table that a key may be in
_WAYS = 4
#: 2**18 keys of 16 tokens are 4 million tokens
_MOST_SETS = 1 << 16
_MOST_KEYS = _WAYS * _MOST_SETS
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class BoardShare:
    """One front end's part of a board: `place` is its row, of `num_places`; `path` the file, None
    for memory of its own."""

    place: int = 0
    num_places: int = 1
    path: str | None = None


class ReplicaBoard:
    """Numbers of `num_places` front ends about `num_replicas` replicas; each front end writes its
    own row of the counts, and all read all.

    `waiting [places, replicas]` int64: tokens that were sent and are not computed yet.
    `worked [places, replicas]` int64: tokens that replicas were given to compute, since the start;
    its sum over places is a replica's clock.

    A table remembers which replicas saw the prefix of a prompt and when, by their clocks: `keys
    [sets, ways]` uint64 and `seen [sets, ways, replicas]` int64. It is a cache: a key has a few
    entries that it may be in, and the one seen longest ago makes room. Front ends write without a
    lock, so that now and then an entry is lost, which costs a hit. `num_keys`: how many it should
    hold. `path`: a file to map; without it the memory is this process's own.
    """

    def __init__(
        self,
        num_replicas: int,
        num_keys: int = _MOST_KEYS,
        num_places: int = 1,
        path: str | None = None,
    ) -> None:
        self.num_replicas = num_replicas
        sets = 1 << max(0, -(-num_keys // _WAYS) - 1).bit_length()
        sets = min(sets, _MOST_SETS)
        shapes = ((num_places, num_replicas),) * 2 + ((sets, _WAYS), (sets, _WAYS, num_replicas))
        sizes = [int(np.prod(shape)) * 8 for shape in shapes]
        memory = _memory(sum(sizes), path)
        starts = np.cumsum([0, *sizes])
        waiting, worked, keys, seen = (
            np.frombuffer(memory, dtype, size // 8, int(start)).reshape(shape)
            for shape, size, start, dtype in zip(
                shapes, sizes, starts, (np.int64, np.int64, np.uint64, np.int64), strict=False
            )
        )
        self.waiting, self.worked, self._keys, self._seen = waiting, worked, keys, seen

    def clear(self, place: int) -> None:
        """The front end is gone, and so is what it waited for."""
        self.waiting[place] = 0

    def forget(self) -> None:
        """No replica has any prefix any more."""
        self._keys[:] = 0

    @property
    def clocks(self) -> np.ndarray:
        """Tokens of work that each replica was ever given `[replicas]`."""
        total: np.ndarray = self.worked.sum(axis=0)
        return total

    @property
    def loads(self) -> np.ndarray:
        """Tokens that wait at each replica `[replicas]`."""
        total: np.ndarray = self.waiting.sum(axis=0)
        return total

    def remember(self, chain: np.ndarray, replica: int) -> None:
        """The replica sees these prefixes now. `chain`: their keys `[prefixes]`, not 0."""
        if not len(chain):
            return
        sets = self._sets(chain)
        seen = self._seen[sets]
        is_it = self._keys[sets] == chain[:, None]
        # Where the key is already, else where no replica was for longest.
        ages = np.where(seen > 0, self.clocks + 1 - seen, _NEVER).min(axis=2)
        ages[self._keys[sets] == 0] = _NEVER
        ways = np.where(is_it.any(axis=1), is_it.argmax(axis=1), ages.argmax(axis=1))
        new = self._keys[sets, ways] != chain
        self._seen[sets[new], ways[new]] = 0
        self._keys[sets, ways] = chain
        # 0 is never: the clock starts at 1 here.
        self._seen[sets, ways, replica] = self.clocks[replica] + 1

    def recall(self, chain: np.ndarray, capacities: np.ndarray) -> np.ndarray:
        """How many prefixes of the chain each replica has, up to its longest, `[replicas]`: those
        that it saw less than its capacity of tokens `[replicas]` ago."""
        if not len(chain):
            return np.zeros(self.num_replicas, np.int64)
        sets = self._sets(chain)
        is_it = self._keys[sets] == chain[:, None]
        seen = np.where(is_it[:, :, None], self._seen[sets], 0).max(axis=1)
        has = (seen > 0) & (seen + capacities > self.clocks)
        # The longest one that it has: all before it are its beginning.
        return np.where(has.any(axis=0), len(chain) - has[::-1].argmax(axis=0), 0)

    def _sets(self, chain: np.ndarray) -> np.ndarray:
        sets: np.ndarray = (chain & np.uint64(len(self._keys) - 1)).astype(np.int64)
        return sets


def _memory(size: int, path: str | None) -> mmap.mmap:
    """Zeros, unless another front end has written to the file."""
    if path is None:
        return mmap.mmap(-1, size)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)
