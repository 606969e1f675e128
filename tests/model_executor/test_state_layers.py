# SPDX-License-Identifier: Apache-2.0
"""Layers with state are found in the built model; clients see them through a weak view."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
from torch import nn

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.state_layers import collect_layers, hand_over_layers, layer_specs
from vllm.v1.kv_cache_interface import MambaSpec


class Layer(nn.Module, AttentionLayerBase):
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any: ...

    def get_attn_backend(self) -> Any: ...


class Named(Layer):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.layer_name = prefix


class EntersItself(Layer):
    """As layers written for other releases do."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        vllm_config.compilation_config.static_forward_context[prefix] = self


def test_layers_in_the_order_of_the_modules() -> None:
    config = VllmConfig()
    late, early = Named("b"), EntersItself(config, "a")
    model = nn.ModuleList([early, nn.Linear(1, 1), nn.ModuleList([late])])
    drafter = nn.ModuleList([Named("drafter.0")])
    layers = collect_layers(config, model, drafter)
    assert list(layers) == ["a", "b", "drafter.0"]
    assert layers["a"] is early and layers["b"] is late
    assert late.kv_cache is None


def test_a_name_is_used_once() -> None:
    config = VllmConfig()
    with pytest.raises(ValueError, match="two layers with state are named 'a'"):
        collect_layers(config, nn.ModuleList([Named("a"), EntersItself(config, "a")]))
    shared = Named("shared")
    assert list(collect_layers(config, nn.ModuleList([shared, shared]))) == ["shared"]


def test_a_layer_without_a_name() -> None:
    model = nn.ModuleDict({"mixer": Layer()})
    with pytest.raises(ValueError, match=r"^mixer, a Layer, .* no `layer_name`; .* `prefix`"):
        collect_layers(VllmConfig(), model)


class WithWrongSpec(Named):
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        return MambaSpec(block_size=16, shapes=((4,),), dtypes=())


def test_a_layer_whose_spec_is_wrong_is_named() -> None:
    layers = {"layers.3.mixer": WithWrongSpec("layers.3.mixer")}
    with pytest.raises(ValueError, match=r"^layers\.3\.mixer: 1 state shapes, but 0 dtypes; give "):
        layer_specs(VllmConfig(), layers)


def test_clients_find_the_layers_and_keep_none_alive() -> None:
    config = VllmConfig()
    model = nn.ModuleList([Named("a"), EntersItself(config, "b")])
    hand_over_layers(config, collect_layers(config, model))
    view = config.compilation_config.static_forward_context
    assert dict(view) == {"a": model[0], "b": model[1]}
    assert get_layers_from_vllm_config(config, Named) == {"a": model[0]}
    del model
    gc.collect()
    assert dict(view) == {}


def test_building_a_model_leaves_the_configuration_alone() -> None:
    """What is sent to other processes holds no layer."""
    config = VllmConfig()
    before = pickle.dumps(config)
    Named("a")
    assert pickle.dumps(config) == before
