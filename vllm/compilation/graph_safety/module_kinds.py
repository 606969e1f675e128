# SPDX-License-Identifier: Apache-2.0
"""The distinct modules of a list: layers that differ in weights alone are walked once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from vllm.compilation.graph_safety.values import Known, Value


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
