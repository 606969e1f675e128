# SPDX-License-Identifier: Apache-2.0
"""The layers of a model that keep state: found once it is built, then shown to clients."""

from collections.abc import Iterator, Mapping
from weakref import WeakValueDictionary

from torch import nn

from vllm.config import VllmConfig
from vllm.model_executor.layer_errors import naming_layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.interfaces import HasPlacements
from vllm.model_executor.placements import Placement
from vllm.v1.kv_cache_interface import KVCacheSpec


def modules_in_use(
    model: nn.Module, placement: Placement | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """All modules by path, of a supernet but for mixers that no layer uses, now or with
    `placement`."""
    unused: set[int] = set()
    if isinstance(model, HasPlacements):
        mixers = model.unused_mixers(*([] if placement is None else [placement]))
        unused = {id(one) for mixer in mixers for one in mixer.modules()}
    return ((path, m) for path, m in model.named_modules() if id(m) not in unused)


def collect_layers(
    vllm_config: VllmConfig, *models: nn.Module, placement: Placement | None = None
) -> dict[str, AttentionLayerBase]:
    """Every layer with state of `models`, built from `vllm_config`, by name, in module order.

    Of a supernet, those that are in use, or of the first model those that would be with
    `placement`: what is built beside it keeps its own.

    A layer is named by its `layer_name`. Layers of other packages may instead enter themselves in
    `compilation_config.static_forward_context` when they are made. ValueError for a layer
    without a name, and for a name used twice.
    """
    entered = vllm_config.compilation_config.static_forward_context
    names = {id(layer): name for name, layer in entered.items()}
    layers: dict[str, AttentionLayerBase] = {}
    for model in models:
        for path, module in modules_in_use(model, placement if model is models[0] else None):
            if isinstance(module, AttentionLayerBase):
                name = names.get(id(module)) or module.layer_name
                if not name:
                    raise ValueError(
                        f"{path}, a {type(module).__name__}, keeps state, but has no `layer_name`; "
                        "set it from the `prefix` that the layer is given"
                    )
                if name in layers:
                    raise ValueError(
                        f"two layers with state are named {name!r}; give each its own `prefix`"
                    )
                layers[name] = module
    return layers


def layer_specs(
    vllm_config: VllmConfig, layers: Mapping[str, AttentionLayerBase]
) -> dict[str, KVCacheSpec]:
    """What each of `layers` keeps, by name; errors name the layer that they come from."""
    specs = {}
    for name, layer in layers.items():
        with naming_layer(name):
            specs[name] = layer.get_kv_cache_spec(vllm_config)
    return specs


def hand_over_layers(vllm_config: VllmConfig, layers: Mapping[str, AttentionLayerBase]) -> None:
    """Let clients find a worker's layers in the configuration that the worker gives them.

    Connectors and attention backends read `compilation_config.static_forward_context`, also by
    `get_layers_from_vllm_config`. The worker calls this once its models are built, and the engine
    itself reads none of it. The view is weak: a configuration keeps no layer alive.
    """
    vllm_config.compilation_config.static_forward_context = WeakValueDictionary(layers)
