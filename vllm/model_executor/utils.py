# SPDX-License-Identifier: Apache-2.0
"""Attributes that a layer attaches to its parameters.

A parameter may carry `weight_loader(param, loaded, shard_id=None)`, called by the loaders, and
`dummy_range = (low, high)`, the uniform range of dummy weights.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def set_weight_attrs(weight: Tensor, weight_attrs: Mapping[str, Any] | None) -> None:
    """Set attributes on a parameter; raises ValueError rather than overwrite one."""
    for key, value in (weight_attrs or {}).items():
        if key in weight.__dict__:
            raise ValueError(f"the parameter already has the attribute {key!r}")
        setattr(weight, key, value)


def get_weight_attr(weight: Tensor, key: str, default: Any) -> Any:
    """An attribute set by `set_weight_attrs`, or `default`."""
    return weight.__dict__.get(key, default)
