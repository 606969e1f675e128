# SPDX-License-Identifier: Apache-2.0
"""What the pass knows of an expression: a tensor, a host value, an object of the process ..."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm.kernels.cuda import CudaKernels
from vllm.kernels.interface import Kernels
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import Platform

Tags = frozenset[str]
NO_TAGS: Tags = frozenset()


@dataclass(frozen=True)
class Value:
    """Base: nothing is known."""


UNKNOWN = Value()


@dataclass(frozen=True)
class Host(Value):
    """A number, string, numpy array ... `batch`: it follows from how many tokens there are;
    `device`: it was read from the device."""

    tags: Tags = NO_TAGS


@dataclass(frozen=True)
class Array(Value):
    """A tensor. `bool`: of truth values; `weight`: there when the model was built; `cpu`: on the
    host; `sized`: its shape depends on data; `sampled`: it holds chosen tokens; `expanded`: it has
    a stride of 0; `joined`: it is a concatenation."""

    tags: Tags = NO_TAGS


@dataclass(frozen=True, eq=False)
class Known(Value):
    """An object of this process."""

    object: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self.object is other.object

    def __hash__(self) -> int:
        return id(self.object)


@dataclass(frozen=True)
class Instance(Value):
    """Some object of a class; `exact`: of no subclass. `fields`: what it was made of."""

    cls: type
    fields: tuple[tuple[str, Value], ...] = ()
    exact: bool = False


@dataclass(frozen=True)
class Capturing(Value):
    """A truth value that is `inside` wherever a graph is captured, and unknown elsewhere."""

    inside: bool


@dataclass(frozen=True)
class Items(Value):
    """A list, tuple or dictionary's values: `first` ones, and what all others are."""

    first: tuple[Value, ...] = ()
    each: Value = UNKNOWN

    def any(self) -> Value:
        """Any of them."""
        others = () if self.first and self.each == UNKNOWN else (self.each,)
        return join_all((*self.first, *others))

    def at(self, index: int) -> Value:
        if 0 <= index < len(self.first):
            return self.first[index]
        return self.any() if self.each == UNKNOWN else self.each


@dataclass(frozen=True)
class Method(Value):
    """A function of the process with its receiver."""

    function: Any
    receiver: Value


@dataclass(frozen=True)
class Member(Value):
    """What a tensor, a list or an unknown object answers under a name."""

    receiver: Value
    name: str


@dataclass(frozen=True)
class Launch(Value):
    """A kernel with its grid."""

    kernel: Any
    grid: Value


@dataclass(frozen=True, eq=False)
class Local(Value):
    """A function or lambda of the body that is read, and the variables it sees."""

    node: ast.FunctionDef | ast.Lambda
    variables: dict[str, Value] = field(repr=False)


@dataclass(frozen=True)
class SuperOf(Value):
    """`super()`: what classes that follow in the order of resolution define."""

    classes: tuple[type, ...]
    receiver: Value

    def method(self, name: str) -> Value:
        for cls in self.classes:
            found = vars(cls).get(name)
            if isinstance(found, FunctionType):
                return Method(found, self.receiver)
        return UNKNOWN


@dataclass(frozen=True)
class Either(Value):
    """One of several."""

    options: tuple[Value, ...]


def options(value: Value) -> tuple[Value, ...]:
    """What it may be."""
    return value.options if isinstance(value, Either) else (value,)


def join(a: Value, b: Value) -> Value:
    """Either; tags add up, and None or a number beside something else is left out."""
    if a == b:
        return a
    if isinstance(a, Capturing) or isinstance(b, Capturing):
        a, b = (Host() if isinstance(one, Capturing) else one for one in (a, b))
    if b == UNKNOWN:
        return a
    if a == UNKNOWN:
        return b
    if isinstance(a, Array) and isinstance(b, Array):
        return Array(a.tags & b.tags | (a.tags | b.tags) & {"sized"})
    if isinstance(a, Host) and isinstance(b, Host):
        return Host(a.tags | b.tags)
    if isinstance(a, Host):
        return b
    if isinstance(b, Host):
        return a
    if isinstance(a, Items) and isinstance(b, Items):
        if len(a.first) == len(b.first):
            first = tuple(join(x, y) for x, y in zip(a.first, b.first, strict=True))
            return Items(first, join(a.each, b.each))
        return Items((), join(a.any(), b.any()))
    merged = dict.fromkeys((*options(a), *options(b)))
    return Either(tuple(merged)) if len(merged) <= 8 else UNKNOWN


def join_all(values: Iterable[Value]) -> Value:
    found = list(values)
    return reduce(join, found) if found else UNKNOWN


def is_array(value: Value) -> bool:
    """Whether it may be a tensor on the device."""
    return any(isinstance(v, Array) and "cpu" not in v.tags for v in options(value))


def tags_of(value: Value) -> Tags:
    """Of everything it may be, and of what it consists of."""
    found: Tags = NO_TAGS
    for option in options(value):
        if isinstance(option, Array | Host):
            found |= option.tags
        elif isinstance(option, Items):
            found |= tags_of(option.any())
    return found


_PLAIN = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, torch.device, torch.Size)


def of_object(thing: Any, depth: int = 2) -> Value:
    """What an object of the process is."""
    if isinstance(thing, Tensor):
        return Array(frozenset({"weight"} | ({"bool"} if thing.dtype == torch.bool else set())))
    if thing is None or isinstance(thing, _PLAIN):
        return Host()
    if isinstance(thing, Platform):
        return Known(analysed_platform())
    if isinstance(thing, list | tuple) and depth:
        return Items(tuple(of_object(item, depth - 1) for item in thing[:16]))
    if isinstance(thing, Mapping) and not isinstance(thing, nn.Module) and depth:
        return Items((), join_all(of_object(v, depth - 1) for v in list(thing.values())[:16]))
    return Known(thing)


@lru_cache(maxsize=1)
def analysed_platform() -> Platform:
    """CUDA's: only there steps are captured. The pass needs no GPU."""
    return CudaPlatform()


@lru_cache(maxsize=1)
def analysed_kernels() -> Kernels:
    """CUDA's, of every GPU: `Op.implementations` names them all."""
    return CudaKernels()


def distinct(thing: Any) -> list[Value]:
    """What iterating over an object gives, one of each kind; nothing for what is no list."""
    if isinstance(thing, nn.ModuleDict | Mapping):
        return []
    if isinstance(thing, nn.ModuleList | nn.Sequential | list | tuple):
        return [Known(one) for one in {kind_of(item): item for item in thing}.values()]
    return []


def kind_of(thing: Any) -> Hashable:
    """Equal for modules of the same classes with the same functions and the same absences."""
    if not isinstance(thing, nn.Module):
        return id(thing)
    own = {
        name: type(value)
        for name, value in vars(thing).items()
        if not name.startswith("_") and not isinstance(value, str | int | float)
    }
    parameters = tuple((name, p is None) for name, p in thing._parameters.items())
    children = tuple((name, kind_of(child)) for name, child in thing._modules.items())
    return (type(thing), tuple(own.items()), parameters, children)
