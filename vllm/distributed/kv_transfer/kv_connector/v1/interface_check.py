# SPDX-License-Identifier: Apache-2.0
"""Whether a connector class is what the engine calls: checked before a process starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.capabilities import ConnectorCapabilities
from vllm.exceptions import VLLMValidationError


@cache
def check_interface(connector_cls: type[KVConnectorBase_V1]) -> None:
    """VLLMValidationError for a class that lacks methods, takes other arguments than the engine
    gives, or has a method where the interface has a property or a class method."""
    name = connector_cls.__name__
    if missing := sorted(connector_cls.__abstractmethods__):
        raise VLLMValidationError(
            f"KV connector {name} lacks {', '.join(missing)}: every connector has these, also "
            "where they do nothing (docs/adding_a_connector.md has a complete one)",
            parameter="kv_connector",
            value=name,
        )
    _check_constructor(connector_cls)
    for method, expected in (vars(ConnectorCapabilities) | vars(KVConnectorBase_V1)).items():
        own = inspect.getattr_static(connector_cls, method)
        if own is expected or method.startswith("_"):
            continue
        if fault := _fault(own, expected):
            raise VLLMValidationError(
                f"KV connector {name}: {method} {fault}", parameter="kv_connector", value=name
            )


def _check_constructor(connector_cls: type[KVConnectorBase_V1]) -> None:
    """Constructors are called by position, so their parameters may have any names."""
    try:
        inspect.signature(connector_cls).bind(None, None, None)
    except TypeError as error:
        raise VLLMValidationError(
            f"{connector_cls.__name__}.__init__ cannot be called with (vllm_config, role, "
            f"kv_cache_config) by position: {error}"
        ) from error


def _fault(own: object, expected: object) -> str | None:
    """What is wrong with a class's own version of a member of the interface."""
    if isinstance(expected, property):
        is_method = isinstance(own, FunctionType | classmethod | staticmethod)
        return "is a property: write @property above it" if is_method else None
    if isinstance(expected, classmethod):
        if isinstance(own, FunctionType):
            return "is a class method: write @classmethod above it"
        if isinstance(own, classmethod):
            return _fault_of_parameters(own.__func__, expected.__func__)
    if isinstance(expected, FunctionType):
        if isinstance(own, property):
            return "is a method: take @property away"
        if isinstance(own, FunctionType):
            return _fault_of_parameters(own, expected)
    return None


def _fault_of_parameters(own: Callable[..., Any], expected: Callable[..., Any]) -> str | None:
    named = [
        parameter
        for parameter in inspect.signature(expected).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    try:
        inspect.signature(own).bind(*named)
    except TypeError as error:
        wanted = ", ".join(parameter.name for parameter in named)
        return f"cannot be called with ({wanted}) by position: {error}"
    return None
