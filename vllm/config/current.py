# SPDX-License-Identifier: Apache-2.0
"""The config that model code being built reads, and look-ups in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from vllm.config.vllm import VllmConfig

L = TypeVar("L")
_current: VllmConfig | None = None


@contextmanager
def set_current_vllm_config(vllm_config: VllmConfig) -> Iterator[VllmConfig]:
    """Make `vllm_config` the current one while a model is built."""
    global _current
    previous = _current
    _current = vllm_config
    try:
        yield vllm_config
    finally:
        _current = previous


def get_current_vllm_config() -> VllmConfig:
    """The current config; raises outside `set_current_vllm_config`."""
    if _current is None:
        raise RuntimeError(
            "no current VllmConfig; models are built inside set_current_vllm_config()"
        )
    return _current


def get_current_vllm_config_or_none() -> VllmConfig | None:
    return _current


def get_layers_from_vllm_config(
    vllm_config: VllmConfig, layer_type: type[L], layer_names: Sequence[str] | None = None
) -> dict[str, L]:
    """Layers with state of one type, by name; `KeyError` for a name that is not registered."""
    layers = vllm_config.compilation_config.static_forward_context
    names = layers if layer_names is None else layer_names
    return {name: layers[name] for name in names if isinstance(layers[name], layer_type)}
