# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model do the same as others, on other weights.

A step that only makes kernels and libraries ready needs one layer of each kind; most of a start's
dummy steps would be spent on the others.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

#: kernels are chosen and compiled by whether addresses are multiples of this, or of less
_ALIGNMENT = 64


def repeated_layers(layers: Sequence[nn.Module], start: int = 0) -> frozenset[int]:
    """Places of the layers that can be left out: the same kind follows the same kind elsewhere.
    The first of `layers` is the model's `start`-th, as their names say.

    How a layer takes up the residual stream depends on the one before it, so what stays has each
    kind after each kind that the model has it after, as true neighbours.
    """
    firsts: list[int] = []
    kinds: list[int] = []
    for place, layer in enumerate(layers):
        alike = (
            first
            for first in firsts
            if _Pair(start + place, start + first).alike(layer, layers[first])
        )
        first = next(alike, None)
        if first is None:
            firsts.append(place)
        kinds.append(place if first is None else first)
    kept: set[int] = set()
    pairs: set[tuple[int | None, int]] = set()
    for place, kind in enumerate(kinds):
        pair = (kinds[place - 1] if place else None, kind)
        if pair not in pairs:
            pairs.add(pair)
            kept |= {max(0, place - 1), place}
    return frozenset(range(len(layers))) - kept


class _Pair:
    """Compares what belongs to two layers, whose names differ in their places.

    Whatever this does not know is different unless it is equal, so that a layer is rather kept.
    """

    def __init__(self, place: int, other: int) -> None:
        self._names = (f".{place}.", f".{other}.")
        self._compared: set[tuple[int, int]] = set()

    def alike(self, a: Any, b: Any) -> bool:
        if a is b:
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, Tensor):
            return tensor_form(a) == tensor_form(b)
        if isinstance(a, str):
            return a.replace(self._names[0], ".*.") == b.replace(self._names[1], ".*.")
        if isinstance(a, dict):
            return list(a) == list(b) and all(map(self.alike, a.values(), b.values()))
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(self.alike, a, b))
        if isinstance(a, MethodType):
            return a.__func__ is b.__func__ and self.alike(a.__self__, b.__self__)
        if isinstance(a, partial):
            return self.alike((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
        if isinstance(a, FunctionType | type):
            return False
        if type(a).__eq__ is object.__eq__ or dataclasses.is_dataclass(a):
            return self._alike_inside(a, b)
        return bool(a == b)

    def _alike_inside(self, a: Any, b: Any) -> bool:
        """Of objects that may refer to each other, and are what their attributes are."""
        pair = (id(a), id(b))
        if pair in self._compared:
            return True
        self._compared.add(pair)
        try:
            return self.alike(vars(a), vars(b))
        except TypeError:  # it has none that Python knows of
            return False


def tensor_form(tensor: Tensor) -> tuple[object, ...]:
    """What kernels are chosen and compiled by, of a tensor; equal forms have equal hashes."""
    place = tensor.data_ptr() % _ALIGNMENT
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, place
