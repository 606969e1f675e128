# SPDX-License-Identifier: Apache-2.0
"""Tensors as a graph keeps them: where they lie and how they are read, without owning anything."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class Handle:
    """A tensor's place: a storage, and how the tensor lies in it. Does not keep the memory."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Handle:
        storage = StorageWeakRef(tensor.untyped_storage())
        where = int(tensor.storage_offset())
        return cls(storage, tensor.dtype, where, tuple(tensor.shape), tensor.stride())

    @property
    def memory(self) -> int:
        """Names the storage for as long as any handle of it exists."""
        return self.storage.cdata

    @property
    def is_freed(self) -> bool:
        return bool(self.storage.expired())

    @property
    def layout(self) -> tuple[object, ...]:
        return (self.dtype, self.shape, self.stride)

    def empty(self) -> Tensor:
        """Another tensor of the same shape, on the CPU."""
        return torch.zeros(self.shape, dtype=self.dtype)

    def open(self) -> Tensor:
        """The tensor. RuntimeError if its memory was freed."""
        storage = storage_of(self.storage)
        if storage is None:
            raise RuntimeError("the memory of a tensor was freed")
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


#: what nothing lies in
_LEAVES = (Tensor, Handle, int, float, str, type(None), torch.dtype, torch.device)
_PLAIN = frozenset({*_LEAVES, bool})


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """What a reference points to; None once it is freed."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


def whole(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage, uint8 `[bytes]`."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Of what `whole` gives; eight bytes at a time where that is possible, which is much sooner."""
    if len(x) == len(y) and len(x) % 8 == 0 and not (x.data_ptr() | y.data_ptr()) % 8:
        return torch.equal(x.view(torch.int64), y.view(torch.int64))
    return torch.equal(x, y)


def rebuilt(value: object, kind: type, change: Callable[[Any], object]) -> Any:
    """`value` with everything of a kind in it changed: in sequences, dicts and dataclasses. What is
    neither stays as it is; arrays of numpy are copied, as a launch keeps what they held."""
    cls: Any = type(value)
    if cls is kind:
        return change(value)
    if cls in _PLAIN:
        return value
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple):
        # Named ones take their parts one by one; this way both do.
        return tuple.__new__(cls, [rebuilt(v, kind, change) for v in value])
    if isinstance(value, list):
        return [rebuilt(v, kind, change) for v in value]
    if isinstance(value, dict):
        return {name: rebuilt(v, kind, change) for name, v in value.items()}
    names = _field_names(cls)
    if not names:
        return value
    made = copy.copy(value)
    for name in names:
        object.__setattr__(made, name, rebuilt(getattr(value, name), kind, change))
    return made


@cache
def _field_names(cls: type) -> tuple[str, ...]:
    """Of a dataclass; none of another class."""
    if not dataclasses.is_dataclass(cls):
        return ()
    return tuple(field.name for field in dataclasses.fields(cls))


def leaves(value: object) -> list[object]:
    """All that `rebuilt` reaches, in order; names of fields and keys are left out."""
    found: list[object] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[object]) -> None:
    """Add the leaves of a value. A profiler looks on (`host_calls.py`), and arguments of launches
    are gathered by the ten thousand: what is plainly a leaf takes no call."""
    cls: Any = type(value)
    parts: Iterable[object]
    if isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif not isinstance(value, _LEAVES) and (names := _field_names(cls)):
        parts = [getattr(value, name) for name in names]
    else:
        found += (value,)
        return
    for part in parts:
        if type(part) in _PLAIN:
            found += (part,)
        else:
            _gather(part, found)


def tensors_in(value: object) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def handles_in(value: object) -> list[Handle]:
    return [leaf for leaf in leaves(value) if type(leaf) is Handle]
