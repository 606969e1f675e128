# SPDX-License-Identifier: Apache-2.0
"""What an attribute is, found on the real objects and classes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from vllm.compilation.graph_safety.annotations import annotated, import_name
from vllm.compilation.graph_safety.values import (
    UNKNOWN,
    Array,
    Host,
    Instance,
    Items,
    Known,
    Member,
    Method,
    Value,
    analysed_kernels,
    is_array,
    join,
    join_all,
    of_object,
    options,
)
from vllm.compilation.graph_safety.walker import Arguments, Mode, Walker
from vllm.kernels.registry import Op, Registry
from vllm.platforms.interface import Platform

_SAME = {"T", "mT", "H", "data", "real", "imag", "grad"}
_HOST_ATTRIBUTES = {
    "dtype", "device", "ndim", "layout", "requires_grad", "is_cpu", "itemsize", "nbytes", "names",
    "is_contiguous", "is_sparse",
}  # fmt: skip
#: classes of which a configuration chooses one: what happens to be imported says nothing
_CHOSEN_APART = "vllm.distributed.kv_transfer.kv_connector."
#: overrides that a call on an object of unknown class may reach
_MOST_OVERRIDES = 16


def attribute(walker: Walker, value: Value, name: str, mode: Mode) -> Value:
    """`value.name`."""
    return join_all(_attribute(walker, option, name, mode) for option in options(value))


def _attribute(walker: Walker, value: Value, name: str, mode: Mode) -> Value:
    if isinstance(value, Array):
        return _of_array(value, name)
    if isinstance(value, Known):
        return _of_known(walker, value, name, mode)
    if isinstance(value, Instance):
        return _of_instance(walker, value, name, mode)
    if isinstance(value, Items) and name in ("values", "indices") and is_array(value):
        return value.any()
    if isinstance(value, Host) and name in ("shape", "size"):
        return Host()
    return Member(value, name)


def shape_of(value: Array) -> Items:
    """Only the first dimension of what is no weight varies with the batch."""
    if "sized" in value.tags:
        return Items((Host(frozenset({"device"})),), Host())
    tags = frozenset() if "weight" in value.tags else frozenset({"batch"})
    return Items((Host(tags),), Host())


def _of_array(value: Array, name: str) -> Value:
    if name == "shape":
        return shape_of(value)
    if name == "is_cuda":
        return Known("cpu" not in value.tags)
    if name in _SAME:
        return value
    return Host() if name in _HOST_ATTRIBUTES else Member(value, name)


def _of_known(walker: Walker, value: Known, name: str, mode: Mode) -> Value:
    thing = value.object
    if isinstance(thing, ModuleType):
        return _of_module(thing, name)
    if isinstance(thing, Platform) and name == "kernels":
        return Known(analysed_kernels())
    if isinstance(thing, Registry):
        op = inspect.getattr_static(type(thing), name, None)
        if isinstance(op, Op):
            return Known(op)
    if isinstance(thing, type):
        found = inspect.getattr_static(thing, name, None)
        if isinstance(found, classmethod):
            return Method(found.__func__, value)
        return Known(found.__func__) if isinstance(found, staticmethod) else of_object(found)
    own = _own_attributes(thing)
    if name in own and own[name] is not None:
        return of_object(own[name])
    found = _of_class(walker, type(thing), value, name, mode)
    if found != UNKNOWN:
        return found
    return Host() if name in own else Member(value, name)


def _own_attributes(thing: Any) -> dict[str, Any]:
    try:
        own = dict(vars(thing))
    except TypeError:
        return {}
    if isinstance(thing, nn.Module):
        own |= {**thing._parameters, **thing._buffers, **thing._modules}
    return own


def _of_module(module: ModuleType, name: str) -> Value:
    if name in vars(module):
        return of_object(vars(module)[name])
    found = import_name(module.__name__, name)
    return UNKNOWN if found is None else of_object(found)


def _of_instance(walker: Walker, value: Instance, name: str, mode: Mode) -> Value:
    fields = dict(value.fields)
    if name in fields and fields[name] != UNKNOWN:
        return fields[name]
    found = _of_class(walker, value.cls, value, name, mode)
    if not value.exact and isinstance(found, Method):
        for override in _overrides(value.cls, name):
            if walker.in_scope(override.__module__):
                found = join(found, _of_class(walker, override, Instance(override), name, mode))
    if found != UNKNOWN:
        return found
    return walker.attributes(value.cls).get(name, Member(value, name))


@cache
def _overrides(cls: type, name: str) -> tuple[type, ...]:
    """Subclasses that define `name` anew; none where they are too many to mean anything, and no
    connectors."""
    if cls.__module__.startswith(_CHOSEN_APART):
        return ()
    found = [sub for sub in _subclasses(cls) if name in vars(sub)]
    return tuple(found) if len(found) <= _MOST_OVERRIDES else ()


def _subclasses(cls: type) -> Iterator[type]:
    found: list[type] = type.__subclasses__(cls)
    for sub in found:
        yield sub
        yield from _subclasses(sub)


def _of_class(walker: Walker, cls: type, receiver: Value, name: str, mode: Mode) -> Value:
    found = inspect.getattr_static(cls, name, None)
    if isinstance(found, property | cached_property):
        getter = found.fget if isinstance(found, property) else found.func
        if isinstance(getter, FunctionType):
            return walker.run(getter, receiver, Arguments(), mode)
        return UNKNOWN
    if isinstance(found, staticmethod):
        return Known(found.__func__)
    if isinstance(found, classmethod):
        return Method(found.__func__, Known(cls))
    if isinstance(found, FunctionType):
        return Method(found, receiver)
    declared = annotation_of(cls, name)
    if declared != UNKNOWN:
        return declared
    if found is None or inspect.ismemberdescriptor(found) or inspect.isgetsetdescriptor(found):
        return UNKNOWN
    return of_object(found)


@cache
def annotation_of(cls: type, name: str) -> Value:
    """Of a class's attribute, where the class or one it derives from declares it."""
    for base in cls.__mro__:
        declared = vars(base).get("__annotations__", {})
        if isinstance(declared, dict) and name in declared:
            module = sys.modules.get(base.__module__)
            names = {} if module is None else vars(module)
            return annotated(declared[name], names, base.__module__)
    return UNKNOWN
