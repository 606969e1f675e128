# SPDX-License-Identifier: Apache-2.0
"""The config that model code being built reads, and look-ups in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from vllm.config.vllm import VllmConfig

L = TypeVar("L")
_current: ContextVar[VllmConfig | None] = ContextVar("vllm_config", default=None)


@contextmanager
def set_current_vllm_config(vllm_config: VllmConfig) -> Iterator[VllmConfig]:
    """Make `vllm_config` and its log of decisions the current ones on this thread, above all while
    a model is built."""
    token = _current.set(vllm_config)
    try:
        with vllm_config.decisions.current():
            yield vllm_config
    finally:
        _current.reset(token)


def get_current_vllm_config() -> VllmConfig:
    """The current config; raises outside `set_current_vllm_config`."""
    current = _current.get()
    if current is None:
        raise RuntimeError(
            "no current VllmConfig; models are built inside set_current_vllm_config()"
        )
    return current


def get_current_vllm_config_or_none() -> VllmConfig | None:
    return _current.get()


def with_own_layers(vllm_config: VllmConfig) -> VllmConfig:
    """A copy for one model: its table of layers is empty and nobody else's, the rest is shared."""
    own = copy.copy(vllm_config)
    own.compilation_config = copy.copy(vllm_config.compilation_config)
    own.compilation_config.static_forward_context = {}
    return own


def get_layers_from_vllm_config(
    vllm_config: VllmConfig, layer_type: type[L], layer_names: Sequence[str] | None = None
) -> dict[str, L]:
    """Layers with state of one type, by name; `KeyError` for a name that is not registered."""
    layers = vllm_config.compilation_config.static_forward_context
    names = layers if layer_names is None else layer_names
    return {name: layers[name] for name in names if isinstance(layers[name], layer_type)}
