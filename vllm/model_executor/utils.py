# SPDX-License-Identifier: Apache-2.0
"""Attributes that a layer attaches to its parameters.

A parameter may carry `weight_loader(param, loaded, shard_id=None)`, called by the loaders,
`dummy_range = (low, high)`, the uniform range of dummy weights, and `optional = True` where a
checkpoint need not have it: another parameter's loader sets it, or it has a `default`, a number
that it gets before every load. `on_host = True`: see `host_weights`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


class AfterLoading:
    """A module that derives something from its loaded parameters, which may be in host memory
    (`host_weights`)."""

    def process_weights_after_loading(self) -> None:
        """Called after every load of the weights."""
        raise NotImplementedError

    def captured_numbers(self) -> tuple[float, ...]:
        """Of what was derived, the numbers that steps pass to kernels: captured steps hold them."""
        return ()


def captured_numbers(models: Iterable[nn.Module]) -> list[float]:
    """Those of every module, in a fixed order."""
    modules = [module for model in models for module in model.modules()]
    return [
        number
        for module in modules
        if isinstance(module, AfterLoading)
        for number in module.captured_numbers()
    ]


def set_weight_attrs(weight: Tensor, weight_attrs: Mapping[str, Any] | None) -> None:
    """Set attributes on a parameter; raises ValueError rather than overwrite one."""
    for key, value in (weight_attrs or {}).items():
        if key in weight.__dict__:
            raise ValueError(f"the parameter already has the attribute {key!r}")
        setattr(weight, key, value)


def get_weight_attr(weight: Tensor, key: str, default: Any) -> Any:
    """An attribute set by `set_weight_attrs`, or `default`."""
    return weight.__dict__.get(key, default)
